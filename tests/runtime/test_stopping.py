"""The time that a scope waits for actors that do not answer, in simulated time."""

from __future__ import annotations

from simulated.simulation import Simulation

from aiodaft import Actor, method


class Idle(Actor):
    @method
    async def answer(self) -> int:
        return 1


def seconds_to_stop(silent: int) -> float:
    """The time that the end of a scope takes in which so many actors are stopped (SIGSTOP)."""
    simulation = Simulation(1)

    async def main() -> float:
        loop = simulation.loop
        async with simulation.runtime(stop_grace=3, cancel_grace=1) as rt:
            async with rt.scope() as scope:
                for _ in range(silent):
                    assert await (await scope.spawn(Idle)).answer() == 1
                for process in simulation.workers:
                    simulation.pause(process, 1000.0)
                began = loop.time()
            return loop.time() - began

    return simulation.run(main())


def test_the_time_for_an_answer_passes_once_for_all_actors_of_a_scope() -> None:
    # Three actors asked one after the other would take 12 s.
    assert 4 <= seconds_to_stop(1) <= 5
    assert 4 <= seconds_to_stop(3) <= 5
