"""The transports by name, and the default one."""

from __future__ import annotations

import os
from typing import Final

from aiodaft_transport.abc import Host, Transport
from aiodaft_transport.exceptions import Unreachable
from aiodaft_transport.handshake import Key
from aiodaft_transport.shm import ShmTransport
from aiodaft_transport.tcp import TcpTransport

# In the order of preference.
NAMES: Final = ("shm", "ucx", "tcp")
# The transport of all GPU memory; users do not choose it.
DEVICE_NAME: Final = "cuda"


def check_name(name: str) -> str:
    """Return `name` if there is such a transport.

    Raises:
        Unreachable: There is no such transport, or it cannot work on this machine.
    """
    if name == DEVICE_NAME:
        raise Unreachable("CUDA tensors use transport 'cuda' automatically; name a transport for host memory here")
    if name not in NAMES:
        raise Unreachable(f"there is no transport {name!r}; there are {', '.join(NAMES)}")
    if name == "shm" and not hasattr(os, "memfd_create"):
        raise Unreachable("transport 'shm' needs memfd_create, which this system does not have; use 'tcp'")
    if name == "ucx":
        from aiodaft_transport.ucx.find_library import load  # noqa: PLC0415 - loaded only if chosen

        load()
    return name


def default_name() -> str:
    """The best transport between processes of this host."""
    return "shm" if hasattr(os, "memfd_create") else "tcp"


def open_transport(name: str, host: Host, key: Key, *, local: str) -> Transport:
    """Open this process's end of a transport. Memory, descriptors and ports are taken at the first use.

    Args:
        name: One of `NAMES`.
        host: The process it serves.
        key: Proves to peers that this process belongs to the cluster; for TCP.
        local: Id of this process among its peers.
    """
    if check_name(name) == "shm":
        return ShmTransport(host)
    if name == "ucx":
        from aiodaft_transport.ucx.transport import UcxTransport  # noqa: PLC0415 - loaded only if chosen

        return UcxTransport(host)
    return TcpTransport(host, key, name=local)
