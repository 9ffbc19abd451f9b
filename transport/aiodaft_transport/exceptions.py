"""Errors of the data plane."""

from __future__ import annotations


class TransportError(Exception):
    pass


class Unreachable(TransportError):
    """This transport cannot move bytes between these two processes."""


class PeerGone(TransportError):
    """The other side ended before the transfer did. Nothing partial was made visible."""


class GrantError(TransportError):
    """A grant names memory that is not here: it is stale, or was never issued."""


class DeviceError(TransportError):
    """An accelerator or its driver failed: the driver's message, and the operation."""


class OutOfDeviceMemory(DeviceError):
    """An accelerator has no memory left."""


class HandshakeError(TransportError):
    """The other side of a connection could not prove that it belongs to this cluster."""


class UnknownVersion(HandshakeError):
    """The two sides of a connection have no version of the handshake in common."""
