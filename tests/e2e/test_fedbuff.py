"""FedBuff against averages of all clients, in virtual time (row TR8)."""

from __future__ import annotations

import fedbuff
import pytest
from simulated import Simulation


def units(buffer: int) -> tuple[float, int]:
    """Simulated time until the goal, where the fastest client takes 1 for an update and the slowest 6."""

    async def main() -> tuple[float, int]:
        async with simulation.runtime() as rt:
            clients = [await rt.spawn(fedbuff.Client, number, float(1 + number)) for number in range(fedbuff.CLIENTS)]
            return await fedbuff.train(clients, buffer, 0.6)

    simulation = Simulation(1)
    found = simulation.run(main())
    assert simulation.problems == []
    return found


def test_clients_of_six_speeds_reach_the_loss_in_half_the_time_if_nobody_waits_for_the_slowest() -> None:
    waiting, rounds = units(buffer=6)
    assert waiting == pytest.approx(6 * rounds, rel=1e-2)
    buffered, steps = units(buffer=2)
    assert steps > rounds
    assert buffered <= waiting / 2
    assert units(buffer=2) == (buffered, steps)
