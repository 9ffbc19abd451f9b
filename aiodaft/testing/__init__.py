"""For tests of programs: simulations under seeded schedules, a loop with a virtual clock, actors without processes."""

from aiodaft.testing.autojump import AutojumpLoop, Hang
from aiodaft.testing.faults import Faults
from aiodaft.testing.in_process import in_process
from aiodaft.testing.network import NetworkConditions, SimulatedNetwork
from aiodaft.testing.simulated_loop import SimulatedLoop, SimulatedProcess
from aiodaft.testing.simulation import Simulation

__all__ = [
    "AutojumpLoop",
    "Faults",
    "Hang",
    "NetworkConditions",
    "SimulatedLoop",
    "SimulatedNetwork",
    "SimulatedProcess",
    "Simulation",
    "in_process",
]
