"""The stores of a coordinator, by the names that users give them."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiodaft._runtime.coordination.sqlite_store import SqliteStore
from aiodaft._runtime.coordination.store import Store

_ETCD: Final = "etcd://"
_ETCD_PORT: Final = 2379


def store_at(state: str) -> Store:
    """The store that `state` names: a file, or "etcd://HOST[:PORT][,HOST[:PORT]...][/PREFIX]".

    Raises:
        ValueError: It names none.
        ImportError: aetcd is not installed.
    """
    if not state.startswith(_ETCD):
        if "://" in state or not state:
            raise ValueError(f"{state!r} is neither a file nor etcd://HOST:PORT")
        return SqliteStore(Path(state))
    where, _, prefix = state.removeprefix(_ETCD).partition("/")
    addresses = []
    for member in where.split(","):
        parts = urlsplit(f"//{member}")
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(f"{member!r} in {state!r} is not HOST:PORT")
        addresses.append((parts.hostname, parts.port or _ETCD_PORT))
    try:
        from aiodaft._runtime.coordination.etcd_store import Address, EtcdStore  # noqa: PLC0415 - aetcd is optional
    except ImportError as error:
        raise ImportError(f"{state} needs aetcd: pip install 'aiodaft[etcd]'") from error
    members = [Address(host, port) for host, port in addresses]
    return EtcdStore(members, f"{prefix.strip('/') or 'aiodaft'}/")
