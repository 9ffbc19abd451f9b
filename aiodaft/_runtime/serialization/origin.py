"""The origin of an actor's class: processes of other machines may import another one by the same name."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import NamedTuple

from aiodaft._runtime.serialization.scripts import importable
from aiodaft.exceptions import SpawnFailed


class Origin(NamedTuple):
    """The file of a module, and the digest of its content."""

    file: str
    digest: bytes


def origin_of(cls: type) -> Origin | None:
    """The origin of a class; None if it is sent by value, or its module has no source that can be read."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not file.endswith(".py") or not importable(cls):
        return None
    try:
        status = os.stat(file)
        return Origin(file, _digest_of(file, status.st_mtime_ns, status.st_size))
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _digest_of(file: str, mtime: int, size: int) -> bytes:
    from hashlib import sha256  # noqa: PLC0415 - takes long to import, and a runtime of one machine does not need it

    with open(file, "rb") as source:
        return sha256(source.read()).digest()


def check_origin(cls: type, sent: Origin, label: str, node: str) -> None:
    """Raise SpawnFailed if a class that another process has sent by its name is another one here."""
    here = origin_of(cls)
    if here is not None and here.digest != sent.digest:
        raise SpawnFailed(
            f"{label} cannot be made on {node}: {cls.__module__} is {here.file} there, which differs from {sent.file} "
            "of the program. Send that with `await rt.ship(...)`, or install the same on every machine"
        )
