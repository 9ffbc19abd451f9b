"""Addresses of nodes: "tcp://host:port", with brackets around an IPv6 address."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(r"tcp://(?:\[(?P<six>[^\[\]/]*)\]|(?P<host>[^\[\]/:]*))(?::(?P<port>[^/:]*))?")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_MAX_PORT: Final = (1 << 16) - 1


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str, *, to_listen: bool = False) -> Address:
    """Port 0, for any free port, is one to listen at only.

    Raises:
        ValueError: The text is no address; the message shows one.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise _none(text, "it is not tcp://HOST:PORT")
    six, host, port = found["six"], found["host"], found["port"]
    if not (port and port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT))):
        raise _none(text, "its port is no number" if port else "it has no port")
    if not (0 if to_listen else 1) <= int(port) <= _MAX_PORT:
        raise _none(text, f"a port is at most {_MAX_PORT}" if int(port) else "port 0 can only be listened at")
    if six is not None:
        try:
            return Address(str(ipaddress.IPv6Address(six)), int(port))
        except ValueError:
            raise _none(text, "the brackets hold no IPv6 address") from None
    if _HOST_NAME.fullmatch(host) is None:
        raise _none(text, "its host is neither a name nor an IP address" if host else "it has no host")
    return Address(host, int(port))


def is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_wildcard(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def _none(text: str, why: str) -> ValueError:
    return ValueError(
        f"{text[:300]!r} is no address of a node: {why}. Write tcp://10.0.0.5:7777, tcp://head:7777 or tcp://[fd00::5]:7777"
    )
