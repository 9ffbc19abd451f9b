"""Payload by remote memory access, through libucp."""

from __future__ import annotations

from typing import Final

# Names the network interface over which it reaches other machines.
INTERFACE_VARIABLE: Final = "AIODAFT_UCX_INTERFACE"
