"""For tests of programs that use actors: simulations under seeded schedules, and an event loop with a virtual clock."""

from aiodaft.testing.autojump import AutojumpLoop, Hang
from aiodaft.testing.network import NetworkConditions, SimulatedNetwork
from aiodaft.testing.simulated_loop import SimulatedLoop, SimulatedProcess
from aiodaft.testing.simulation import Simulation

__all__ = [
    "AutojumpLoop",
    "Hang",
    "NetworkConditions",
    "SimulatedLoop",
    "SimulatedNetwork",
    "SimulatedProcess",
    "Simulation",
]
