"""The benchmarks run, and say what they measured; how fast anything is is not for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from aiodaft.bench.floors import Copy, open_echo, run_python
from aiodaft.bench.results import Result, as_json, in_turns, table
from aiodaft.bench.stalls import Watch


@pytest.mark.timeout(60)
async def test_the_command_prints_json_with_floors_from_the_same_run() -> None:
    command = [sys.executable, "-m", "aiodaft.bench", "calls", "--turns", "1", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    results = {result["name"]: result for result in json.loads(output)["results"]}
    round_trip = results["async def method, round trip"]
    assert round_trip["value"] > 0
    assert round_trip["floor"] > 0
    assert round_trip["budget"] == "<= 2.0"
    assert set(results) >= {"1,000 calls in flight", "one call to each of 8", "chain A -> B -> C"}


async def test_an_unknown_suite_is_refused() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiodaft.bench", "dance", stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"calls" in errors


def test_a_budget_is_about_the_ratio_or_else_the_value() -> None:
    assert Result("a", 5.0, "us", 2.0, "echo", 2.5, "<= 2.0").within is False
    assert Result("a", 5.0, "us", 2.0, "echo", 0.5, ">= 0.4").within is True
    assert Result("a", 5.0, "ms", budget="<= 5.0").within is True
    assert Result("a", 5.0, "ms").within is None


def test_the_table_has_a_line_for_each_and_marks_what_was_missed() -> None:
    lines = table([Result("slow", 5.0, "us", 2.0, "echo", 2.5, "<= 2.0"), Result("free", 1.0, "ms")]).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["slow", "(us)", "5", "2", "2.50x", "<=", "2.0", "MISSED"]
    assert json.loads(as_json([Result("free", 1.0, "ms")]))["results"][0]["within"] is None


async def test_ours_and_the_floor_take_turns() -> None:
    taken: list[str] = []

    async def ours() -> float:
        taken.append("ours")
        return 4.0

    async def floor() -> float:
        taken.append("floor")
        return 2.0

    assert await in_turns(ours, floor, 3) == (4.0, 2.0, 2.0)
    assert taken == ["ours", "floor"] * 3


async def test_floors_do_what_they_say() -> None:
    async with open_echo() as echo:
        assert await echo.call("value") == [1, "value"]
        assert await echo.round_trip(3) > 0
        assert await echo.pipelined(100, 10) > 0
    assert await Copy(1000).seconds() > 0
    assert await run_python("pass") > 0
    with pytest.raises(RuntimeError, match="failed"):
        await run_python("raise SystemExit(3)")


async def test_a_stall_of_the_loop_is_seen() -> None:
    loop = asyncio.get_running_loop()
    watch = Watch(loop)
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    began = loop.time()
    while loop.time() - began < 0.03:
        pass
    assert watch.stop() > 0.02
