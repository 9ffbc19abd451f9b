"""Bytes and buffers between the processes of a cluster. Knows nothing of actors."""

from aiodaft_transport.abc import Control, Grant, Host, Transport, size_of
from aiodaft_transport.exceptions import (
    DeviceError,
    GrantError,
    HandshakeError,
    OutOfDeviceMemory,
    PeerGone,
    TransportError,
    UnknownVersion,
    Unreachable,
)
from aiodaft_transport.handshake import Key
from aiodaft_transport.memory import Block, Pullable
from aiodaft_transport.registry import (
    DEVICE_NAME,
    NAMES,
    check_name,
    choose_name,
    default_name,
    open_transport,
    reached_by,
)

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
    "OutOfDeviceMemory",
    "PeerGone",
    "Pullable",
    "Transport",
    "TransportError",
    "UnknownVersion",
    "Unreachable",
    "check_name",
    "choose_name",
    "default_name",
    "open_transport",
    "reached_by",
    "size_of",
]
