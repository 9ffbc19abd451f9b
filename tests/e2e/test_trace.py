"""`rt.trace()` records calls, steps, values on their way and collectives of all processes on one clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import signal
from pathlib import Path

import pytest
from inside import peer_of
from traced import Stage, TraceFile

import aiodaft
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.graphs.participant import Graphs

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


async def names_of(rt: aiodaft.Runtime, *actors: Stage) -> list[str]:
    return [(await rt.info(actor)).name for actor in actors]


async def test_a_chain_has_its_calls_its_transfers_its_waits_and_arrows(module_rt: aiodaft.Runtime, path: Path) -> None:
    rt = module_rt
    a, b, c = [await rt.spawn(Stage) for _ in range(3)]
    x, y, z = await names_of(rt, a, b, c)
    await a.twice(b"before")
    async with rt.trace(path) as trace:
        await c.twice(b.longer(a.twice(b"x" * MIB))).ready()
    await a.twice(b"after")
    file = TraceFile(path)
    file.check_tracks()
    assert file.mode == 0o600
    assert file.of("call") == [f"{x}: Stage.twice", f"{y}: Stage.longer", f"{z}: Stage.twice"]
    called = [f"controller: Stage.{name}" for name in (f"twice of {x}", f"longer of {y}", f"twice of {z}")]
    assert file.of("submit") == called
    assert file.arrows("call") == list(zip(called, file.of("call"), strict=True))
    assert file.arrows("value") == list(itertools.pairwise(file.of("call")))
    assert file.of("transfer") == [f"{x}: shm 1 MiB", f"{y}: shm 2 MiB", f"{z}: shm 2 MiB"]
    transfers = [one["args"] for one in file.slices if one["cat"] == "transfer"]
    assert sorted((one["from"], one["bytes"], one["kind"]) for one in transfers) == sorted([
        ("controller", MIB, "shm"),
        (x, 2 * MIB, "shm"),
        (y, 2 * MIB + 1, "shm"),
    ])
    assert {f"{y}: Stage.longer needs arguments", f"{z}: Stage.twice needs arguments"} <= set(file.waits())
    assert {file.threads[one["pid"], one["tid"]] for one in file.slices if one["cat"] == "call"} == {x, y, z}
    # A call begins after its argument was made, on one clock.
    calls = sorted((one for one in file.slices if one["cat"] == "call"), key=lambda one: one["ts"])
    assert all(first["ts"] + first["dur"] <= then["ts"] for first, then in itertools.pairwise(calls))
    assert (trace.left_out, trace.dropped) == ({}, {})


async def test_a_compiled_chain_has_its_steps_and_arrows(module_rt: aiodaft.Runtime, path: Path) -> None:
    rt = module_rt
    a, b, c = [await rt.spawn(Stage) for _ in range(3)]
    x, y, z = await names_of(rt, a, b, c)
    graph = aiodaft.compile(lambda value: c.twice(b.longer(a.twice(value))))
    await graph(b"before")
    async with graph, rt.trace(path):
        await graph(b"x" * MIB).ready()
        # Made while the trace is recorded.
        async with aiodaft.compile(lambda value: a.fail(value)) as failing:
            with pytest.raises(ValueError, match="of the program"):
                await failing(b"small")
    file = TraceFile(path)
    file.check_tracks()
    steps = [f"{x}: Stage.twice", f"{y}: Stage.longer", f"{z}: Stage.twice"]
    assert file.of("step") == [*steps, f"{x}: Stage.fail: ValueError"]
    runs = file.of("submit")
    assert [run.endswith("of a graph") for run in runs] == [True, True]
    assert file.arrows("call") == [(runs[0], steps[0]), (runs[1], f"{x}: Stage.fail: ValueError")]
    assert file.arrows("value") == [(steps[0], steps[1]), (steps[1], steps[2])]
    assert len(file.of("graph")) == 4
    assert [one["args"]["bytes"] for one in file.slices if one["cat"] == "transfer"] != []


async def test_it_says_how_calls_ended(module_rt: aiodaft.Runtime, path: Path) -> None:
    rt = module_rt
    a, b, killed = [await rt.spawn(Stage) for _ in range(3)]
    x, y, z = await names_of(rt, a, b, killed)
    async with rt.trace(path) as trace:
        with pytest.raises(ValueError, match="of the program"):
            await a.fail(b"")
        cancelled = a.wait()
        await a.has_begun()
        cancelled.cancel()
        with pytest.raises(aiodaft.CallCancelled):
            await cancelled
        assert await a.ask(b, b"x") == b"x!"
        lost = killed.wait()
        await killed.has_begun()
        await rt.kill(killed)
        with pytest.raises(aiodaft.ActorDied):
            await lost
        unfinished = b.wait()
        await b.has_begun()
    unfinished.cancel()
    file = TraceFile(path)
    file.check_tracks()
    calls = file.of("call")
    assert {f"{x}: Stage.fail: ValueError", f"{x}: Stage.wait: cancelled", f"{y}: Stage.wait"} <= set(calls)
    assert f"controller: Stage.wait of {z}: ActorDied" in file.of("submit")
    assert (f"{x}: Stage.longer of {y}", f"{y}: Stage.longer") in file.arrows("call")
    outcomes = {file.where(one): one["args"]["outcome"] for one in file.slices if one["cat"] == "call"}
    assert outcomes[f"{y}: Stage.wait"] == "unfinished"
    assert outcomes[f"{y}: Stage.longer"] == "returned"
    # The submission lies inside of the call that made it.
    made = next(one for one in file.slices if one["name"] == f"Stage.longer of {y}")
    assert file.threads[made["pid"], made["tid"]] == x
    assert trace.left_out == {z: "it ended before it could give its events"}
    assert file.content["otherData"]["left out"] == trace.left_out


async def test_actors_that_come_and_go_in_the_block_are_in_it(module_rt: aiodaft.Runtime, path: Path) -> None:
    async with module_rt.trace(path) as trace:
        async with module_rt.spawn(Stage) as stage:
            (name,) = await names_of(module_rt, stage)
            assert await stage.ask_own(b"x") == b"x!"
        members = await module_rt.group(2, Stage)
        assert await members.all(Stage.total, 1) == [2, 2]
    file = TraceFile(path)
    file.check_tracks()
    assert f"{name}: Stage.ask_own" in file.of("call")
    assert [one for one in file.of("call") if one.endswith("Stage.longer")] != []
    assert len([one for one in file.of("collective") if "all_reduce 'total'" in one]) == 2
    assert trace.left_out == {}


async def test_an_actor_that_was_restarted_in_the_block_is_in_it(module_rt: aiodaft.Runtime, path: Path) -> None:
    stage = await module_rt.on(restart=aiodaft.Restart()).spawn(Stage)
    (name,) = await names_of(module_rt, stage)
    async with module_rt.trace(path) as trace:
        assert await stage.longer(b"lost") == b"lost!"
        os.kill((await module_rt.info(stage)).pid, signal.SIGKILL)
        while (await module_rt.info(stage)).epoch == 0:
            pass
        other = await module_rt.on(with_=stage).spawn(Stage)
        assert await other.ask(stage, b"x") == b"x!"
    file = TraceFile(path)
    file.check_tracks()
    process = " and ".join([name, *await names_of(module_rt, other)])
    assert sorted(file.of("call")) == [f"{process}: Stage.ask", f"{process}: Stage.longer"]
    assert set(trace.left_out.values()) == {"it ended before it could give its events"}


async def test_a_process_that_does_not_answer_is_left_out_after_the_patience(
    module_rt: aiodaft.Runtime, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rt = module_rt
    a, stopped = [await rt.spawn(Stage) for _ in range(2)]
    x, y = await names_of(rt, a, stopped)
    with caplog.at_level(logging.WARNING, "aiodaft"):
        async with rt.trace(path, patience=0.2) as trace:
            await a.twice(b"x")
            os.kill((await rt.info(stopped)).pid, signal.SIGSTOP)
    await rt.kill(stopped)
    assert trace.left_out == {y: "it did not answer in 0.2 s"}
    assert f"lacks the events of {y}: it did not answer in 0.2 s" in caplog.text
    assert TraceFile(path).of("call") == [f"{x}: Stage.twice"]


async def test_a_process_that_records_a_trace_of_its_own_is_left_out(
    module_rt: aiodaft.Runtime, path: Path, tmp_path: Path
) -> None:
    stage = await module_rt.spawn(Stage)
    (name,) = await names_of(module_rt, stage)
    own = stage.trace_own(str(tmp_path / "own.json"))
    await stage.has_begun()
    async with module_rt.trace(path) as trace:
        await stage.has_begun()
    own.cancel()
    await own.ready()
    assert trace.left_out == {name: "it records the trace of another process"}


async def test_events_beyond_the_limit_are_counted(module_rt: aiodaft.Runtime, path: Path) -> None:
    stage = await module_rt.spawn(Stage)
    (name,) = await names_of(module_rt, stage)
    async with module_rt.trace(path, limit=3) as trace:
        for _ in range(5):
            await stage.twice(b"x")
    file = TraceFile(path)
    assert file.of("call") == [f"{name}: Stage.twice"] * 3
    assert trace.dropped == {name: 2, "the program": 2}
    assert file.content["otherData"]["dropped events"] == {name: 2, "controller": 2}


async def test_outside_of_the_block_the_runtime_is_as_without_traces(module_rt: aiodaft.Runtime, path: Path) -> None:
    peer = peer_of(module_rt)
    stage = await module_rt.spawn(Stage)
    waiting = stage.wait()
    await stage.has_begun()
    with pytest.raises(ValueError, match="of the block"):
        async with module_rt.trace(path):
            assert type(peer.sender) is not Outgoing
            await stage.twice(b"x")
            raise ValueError("of the block")
    # The call began before the trace, and ends after it.
    waiting.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await waiting
    assert (type(peer.sender), type(peer.graphs), peer.process.recorder) == (Outgoing, Graphs, None)
    assert {type(hosted) for hosted in peer.actors.values()} == {HostedActor}
    assert len(TraceFile(path).of("call")) == 2
    assert TraceFile(path).slices[-1]["ts"] >= 0


async def test_a_block_that_is_cancelled_leaves_what_was_recorded(module_rt: aiodaft.Runtime, path: Path) -> None:
    stage = await module_rt.spawn(Stage)
    within = asyncio.Event()

    async def block() -> None:
        async with module_rt.trace(path):
            # Valid from the beginning.
            assert TraceFile(path).content == {"traceEvents": []}
            await stage.twice(b"x")
            within.set()
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(block())
    await within.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(TraceFile(path).of("call")) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


async def test_nothing_is_recorded_after_a_trace_that_was_cancelled_when_it_began(
    module_rt: aiodaft.Runtime, path: Path
) -> None:
    a, stopped = [await module_rt.spawn(Stage) for _ in range(2)]
    os.kill((await module_rt.info(stopped)).pid, signal.SIGSTOP)

    async def begin() -> None:
        async with module_rt.trace(path, patience=60):
            raise AssertionError("it has not waited for the one that was stopped")

    task = asyncio.get_running_loop().create_task(begin())
    while not await a.records():
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It is told so, and not asked.
    while await a.records():
        pass
    await module_rt.kill(stopped)


async def test_what_cannot_be_traced_is_refused_at_once(module_rt: aiodaft.Runtime, path: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        module_rt.trace(path, limit=0)
    with pytest.raises(FileNotFoundError):
        async with module_rt.trace(path / "missing" / "run.json"):
            pass
    device = path.with_name("device")
    os.mkfifo(device)
    with pytest.raises(FileExistsError, match="and no file"):
        async with module_rt.trace(device):
            pass
    async with module_rt.trace(path):
        with pytest.raises(RuntimeError, match="another trace is"):
            async with module_rt.trace(path):
                pass
    async with module_rt.trace(path):
        pass


async def test_a_trace_for_which_there_is_no_room_leaves_no_part_of_it(module_rt: aiodaft.Runtime, path: Path) -> None:
    a = await module_rt.spawn(Stage)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="too large"):
            async with module_rt.trace(path):
                await asyncio.gather(*(a.records() for _ in range(100)))
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(path.parent) == [path.name]
    assert TraceFile(path).content == {"traceEvents": []}


async def test_another_clock_is_asked_for_its_offset(
    module_rt: aiodaft.Runtime, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodaft.tracing.clock_id", lambda: "the clock of another machine")
    stage = await module_rt.spawn(Stage)
    async with module_rt.trace(path) as trace:
        await stage.twice(b"x")
    assert len(TraceFile(path).of("call")) == 1
    assert trace.left_out == {}
