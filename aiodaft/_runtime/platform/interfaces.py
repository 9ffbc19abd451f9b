"""The network interfaces of this machine, and which of them leads to another one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiodaft._protocol.connections.address import parse_address

# The request for the IPv4 address of an interface, see netdevice(7), and where its answer has it.
_SIOCGIFADDR: Final = 0x8915
_REQUEST: Final = struct.Struct("16s20x4x")
_ADDRESS: Final = slice(20, 24)
_INET6: Final = Path("/proc/net/if_inet6")


def interface_to(address: str) -> str:
    """The IP address of this machine that another one sees. Raises OSError if nothing leads there."""
    host, port = parse_address(address)
    family, kind, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing.
        probe.connect(at)
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of each interface that has some, apart from those of one link."""
    found: dict[str, list[str]] = {}
    for name, ip in (*_addresses4(), *_addresses6()):
        found.setdefault(name, []).append(ip)
    return found


def _addresses4() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
                yield name, socket.inet_ntoa(answer[_ADDRESS])


def _addresses6() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            ip = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not ip.is_link_local:
                yield name, str(ip)
