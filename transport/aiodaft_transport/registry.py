"""Which transports there are, and which one two processes use. The only place that maps names to transports."""

from __future__ import annotations

import os
from typing import Final

from .abc import Host, Transport
from .exceptions import Unreachable
from .handshake import Key
from .shm import ShmTransport
from .tcp import TcpTransport

# Best first.
NAMES: Final = ("shm", "tcp")


def check_name(name: str) -> str:
    """Return `name` if there is such a transport.

    Raises:
        Unreachable: There is none, or it cannot work on this machine; says why.
    """
    if name not in NAMES:
        raise Unreachable(f"there is no transport {name!r}; there are {', '.join(NAMES)}")
    if name == "shm" and not hasattr(os, "memfd_create"):
        raise Unreachable("transport 'shm' needs memfd_create, which this system does not have; use 'tcp'")
    return name


def default_name() -> str:
    """The best transport between processes of this host."""
    return "shm" if hasattr(os, "memfd_create") else "tcp"


def open_transport(name: str, host: Host, key: Key, *, local: str) -> Transport:
    """Open this process's end of a transport.

    Args:
        name: One of `NAMES`.
        host: The process it serves.
        key: What proves membership where strangers could connect.
        local: Id of this process among its peers.
    """
    if check_name(name) == "shm":
        return ShmTransport(host)
    return TcpTransport(host, key, name=local)
