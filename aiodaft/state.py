"""The state of a running program: records that `rt.overview()`, `rt.info()`, `rt.nodes()` and `rt.traffic()` return."""

from aiodaft._runtime.connections.route import Traffic
from aiodaft.overview import ActorInfo, NodeInfo, Overview

__all__ = ["ActorInfo", "NodeInfo", "Overview", "Traffic"]
