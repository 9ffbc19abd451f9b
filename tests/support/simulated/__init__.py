"""Programs in one process and in virtual time, under seeded schedules of deaths, pauses and cut connections."""

from simulated.network import NetworkConditions, SimulatedNetwork
from simulated.simulated_loop import SimulatedLoop, SimulatedProcess
from simulated.simulation import Simulation

__all__ = ["NetworkConditions", "SimulatedLoop", "SimulatedNetwork", "SimulatedProcess", "Simulation"]
