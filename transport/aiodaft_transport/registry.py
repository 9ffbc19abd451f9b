"""The transports by name, and the default one."""

from __future__ import annotations

import os
from typing import Final

from aiodaft_transport.abc import Host, Transport
from aiodaft_transport.exceptions import Unreachable
from aiodaft_transport.shm import ShmTransport
from aiodaft_transport.system import shares_memory
from aiodaft_transport.tcp import TcpTransport
from aiodaft_transport.ucx import INTERFACE_VARIABLE

# In the order of preference.
NAMES: Final = ("shm", "ucx", "tcp")
# Users do not choose the transport of GPU memory.
DEVICE_NAME: Final = "cuda"


def check_name(name: str) -> str:
    if name == DEVICE_NAME:
        raise Unreachable("CUDA tensors use transport 'cuda' automatically; name a transport for host memory here")
    if name not in NAMES:
        raise Unreachable(f"there is no transport {name!r}; there are {', '.join(NAMES)}")
    if name == "shm" and not shares_memory():
        raise Unreachable("transport 'shm' needs memfd_create and eventfd, which this system does not have; use 'tcp'")
    if name == "ucx":
        from aiodaft_transport.ucx.ucp import load  # noqa: PLC0415 - loaded only if chosen

        load()
    return name


def default_name() -> str:
    return "shm" if shares_memory() else "tcp"


def reached_by() -> tuple[str, ...]:
    """The transports, beside `tcp`, over which processes of other machines reach this one.

    Raises:
        ValueError: The environment names all interfaces for `ucx`.
        Unreachable: It names one that this machine does not have, or there is no libucp.
    """
    interface = os.environ.get(INTERFACE_VARIABLE)
    if not interface:
        return ()
    from aiodaft_transport.ucx.transport import options_for  # noqa: PLC0415 - loaded only if chosen

    options_for(interface)
    return (check_name("ucx"),)


def choose_name(asked: str | None, *, one_machine: bool, ucx: bool) -> str:
    """Choose the transport between two processes.

    Args:
        ucx: Whether `ucx` reaches both from other machines.

    Raises:
        Unreachable: The user's choice does not lead from one to the other.
    """
    if one_machine:
        return asked or default_name()
    if asked == "shm":
        raise Unreachable("transport 'shm' does not lead to another machine: use 'tcp', or name none")
    if asked == "ucx" and not ucx:
        raise Unreachable(
            "transport 'ucx' does not lead to another machine unless both machines name a network interface for it: "
            f"set {INTERFACE_VARIABLE} there, use 'tcp', or name none"
        )
    return asked or ("ucx" if ucx else "tcp")


def open_transport(name: str, host: Host) -> Transport:
    """Memory and descriptors are taken at the first use."""
    if check_name(name) == "shm":
        return ShmTransport(host)
    if name == "ucx":
        from aiodaft_transport.ucx.transport import UcxTransport  # noqa: PLC0415 - loaded only if chosen

        return UcxTransport(host)
    return TcpTransport(host)
