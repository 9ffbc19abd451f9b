"""Bytes and buffers between the processes of a cluster. Knows nothing of actors."""

from .abc import Block, Control, Grant, Host, Pullable, Transport, size_of
from .exceptions import DeviceError, GrantError, HandshakeError, PeerGone, TransportError, Unreachable
from .handshake import Key
from .registry import DEVICE_NAME, NAMES, check_name, default_name, open_transport

__all__ = [
    "DEVICE_NAME",
    "NAMES",
    "Block",
    "Control",
    "DeviceError",
    "Grant",
    "GrantError",
    "HandshakeError",
    "Host",
    "Key",
    "PeerGone",
    "Pullable",
    "Transport",
    "TransportError",
    "Unreachable",
    "check_name",
    "default_name",
    "open_transport",
    "size_of",
]
