"""Code that a program sends to nodes: files in one archive, which is named by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from aiodaft._protocol.ids import PeerId

# The limits of one archive.
MAX_FILES: Final = 10_000
MAX_BYTES: Final = 64 << 20


class Code(NamedTuple):
    """The code that the workers of an actor import before anything else.

    Attributes:
        digests: Their digests, first those that are searched first.
    """

    source: PeerId
    digests: tuple[str, ...] = ()


class File(NamedTuple):
    """A file of an archive; its path is relative, with `/` between its parts."""

    path: str
    executable: bool
    content: bytes


def check_files(files: Sequence[File]) -> None:
    """Raise ValueError if files exceed a limit, or a path leads out of the folder that they are unpacked to."""
    if len(files) > MAX_FILES or sum(len(file.content) for file in files) > MAX_BYTES:
        raise ValueError(f"an archive of code has at most {MAX_FILES:,} files and {MAX_BYTES:,} bytes")
    for path, _, _ in files:
        if "\0" in path or {"", ".", ".."} & set(path.split("/")):
            raise ValueError(f"{path!r:.200} does not lie in the folder of the archive")


def digest_of(archive: bytes) -> str:
    from hashlib import sha256  # noqa: PLC0415 - takes long to import, and few programs send code

    return sha256(archive).hexdigest()
