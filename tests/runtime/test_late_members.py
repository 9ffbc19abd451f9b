"""Members that are late for a collective are reported, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from simulated import Simulation

import aiodaft
from aiodaft import Actor, method
from aiodaft._runtime.diagnostics import watchdog
from aiodaft.dashboard.feed import frame_of
from aiodaft.prometheus import Metrics


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    # A simulation has no log.
    monkeypatch.setattr(watchdog, "logger", logging.getLogger("watchdog"))


class Worker(Actor):
    @method
    async def make(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return 1.0

    @method
    async def fail(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        raise LookupError

    @method
    async def meet(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return await aiodaft.current_group().all_reduce(1.0, key="loss")


async def all_reduce(group: aiodaft.Group[Worker], seconds: list[float], *, in_methods: bool) -> list[float]:
    if in_methods:
        return await group.each(Worker.meet, seconds)
    return await aiodaft.all_reduce(group.each(Worker.make, seconds))


@pytest.mark.parametrize("in_methods", [False, True])
def test_a_member_that_is_late_is_reported_within_a_second_and_the_collective_goes_on(
    caplog: pytest.LogCaptureFixture, in_methods: bool
) -> None:
    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if "not come" in record.getMessage()]

    async def main() -> None:
        async with simulation.runtime() as rt, rt.group(3, Worker) as group:
            for _ in range(2):
                assert await all_reduce(group, [0.1, 0.2, 0.1], in_methods=in_methods) == [3.0] * 3
            late = asyncio.get_running_loop().create_task(all_reduce(group, [0.2, 0.1, 9.0], in_methods=in_methods))
            await asyncio.sleep(0.1 + 0.1 + 0.4)  # the first one that comes, the usual time, and less than it is told
            assert warned() == []
            await asyncio.sleep(0.6)
            (warning,) = warned()
            who = "rank 2" if in_methods else "rank 2 (Worker-1[2])"
            assert f": {who} of 3 has not come for 0." in warning
            assert "; usually all come within 1" in warning
            assert ("all_reduce 'loss' of " in warning) is in_methods
            assert ("all_reduce of Worker.make" in warning) is not in_methods
            (seen,) = [text for process in (await rt.overview()).processes for text in process.late]
            (shown,) = [text for process in (await rt.stack()).processes for text in process.collectives]
            metrics, _ = await Metrics(rt).scrape()
            late_at = re.findall(r'process_late_collectives{.*process="(.*)",role.*} 1.0', metrics.decode())
            assert late_at == [process.title for process in (await rt.overview()).processes if process.late]
            frame = frame_of(await rt.overview(), None)
            assert [one["title"] for one in frame["processes"] if one["late"]] == late_at
            assert seen.partition(" for ")[0] == shown.partition(" for ")[0] == warning.partition(" for ")[0]
            # Told once, and not ended.
            assert await late == [3.0] * 3
            assert len(warned()) == 1
            assert not any(process.late for process in (await rt.overview()).processes)

    simulation = Simulation(1)
    simulation.run(main())


def test_before_the_usual_time_is_known_a_member_has_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with simulation.runtime() as rt, rt.group(2, Worker) as group:
            await all_reduce(group, [0.1, 4.9], in_methods=True)
            assert "not come" not in caplog.text
            # If none comes, none is late.
            await all_reduce(group, [30.0, 30.1], in_methods=False)
            assert "not come" not in caplog.text
            await all_reduce(group, [0.1, 7.0], in_methods=True)
            assert "rank 1 of 2 has not come for 5." in caplog.text

    simulation = Simulation(1)
    simulation.run(main())


def test_values_that_fail_say_nothing_about_the_usual_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with simulation.runtime() as rt, rt.group(2, Worker) as group:
            for _ in range(2):
                await all_reduce(group, [0.1, 0.2], in_methods=False)
            for _ in range(2):
                with pytest.raises(ExceptionGroup, match="2 members failed"):
                    await aiodaft.all_reduce([group[0].make(0.1), group[1].fail(9.0)])
            caplog.clear()
            late = asyncio.get_running_loop().create_task(all_reduce(group, [0.1, 5.0], in_methods=False))
            await asyncio.sleep(1.2)
            assert "rank 1 (Worker-1[1]) of 2 has not come for 0." in caplog.text
            await late

    simulation = Simulation(1)
    simulation.run(main())
