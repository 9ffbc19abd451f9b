"""The autojump loop: time passes only where every task waits, and a hang is an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from aiodaft.testing import AutojumpLoop, Hang

pytest_plugins = ["pytester"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        return runner.run(main)


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def main() -> tuple[list[int], float]:
        order: list[int] = []

        async def note(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(note(86_400), note(60), note(3600))
        return order, asyncio.get_running_loop().time()

    order, now = run(main())
    assert order == [60, 3600, 86_400]
    assert now == pytest.approx(86_400)


def test_the_clock_stands_still_while_a_task_runs() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


def test_a_timeout_ends_what_takes_longer() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(11)

    run(main())


def test_a_wait_that_nothing_ends_is_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Hang, match="every task waits"):
        run(main())


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> float:
        began, go_on = threading.Event(), threading.Event()

        def work() -> None:
            began.set()
            assert go_on.wait(20)

        async with asyncio.timeout(1):
            working = asyncio.get_running_loop().run_in_executor(None, work)
            await asyncio.to_thread(began.wait)
            go_on.set()
            await working
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


def test_pytest_asyncio_runs_tests_on_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from aiodaft.testing import AutojumpLoop

        def pytest_asyncio_loop_factories(config, item):
            return {"autojump": AutojumpLoop}
        """
    )
    pytester.makepyfile(
        """
        import asyncio

        async def test_an_hour():
            await asyncio.sleep(3600)
            assert asyncio.get_running_loop().time() == 3600
        """
    )
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", timeout=50)
    result.assert_outcomes(passed=1)
