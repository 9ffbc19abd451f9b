"""Bytes and buffers between the processes of a cluster. Knows nothing of actors."""

from .abc import Block, Control, Grant, Host, Transport, size_of
from .exceptions import GrantError, HandshakeError, PeerGone, TransportError, Unreachable
from .handshake import Key
from .registry import NAMES, check_name, default_name, open_transport

__all__ = [
    "NAMES",
    "Block",
    "Control",
    "Grant",
    "GrantError",
    "HandshakeError",
    "Host",
    "Key",
    "PeerGone",
    "Transport",
    "TransportError",
    "Unreachable",
    "check_name",
    "default_name",
    "open_transport",
    "size_of",
]
