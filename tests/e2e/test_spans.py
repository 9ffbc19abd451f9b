"""Spans of OpenTelemetry, from the real SDK in each process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from log_ear import listening
from opentelemetry import baggage, context, trace
from span_files import FOLDER, SpanFolder, fail, set_up, set_up_slow
from spanned import Unprintable, Worker

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "baggage": "user=7"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aiodaft.Runtime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("spans")))
        async with aiodaft.Runtime(preload=(), telemetry=set_up) as runtime:
            await runtime.stop(await runtime.spawn(Worker))
            yield runtime


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpanFolder:
    """The spans of the actors that are spawned in a test, and of the program."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return SpanFolder(tmp_path)


async def test_a_call_is_a_span_of_its_caller_and_one_of_the_actor(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    one, other = await module_rt.spawn(Worker), await module_rt.spawn(Worker)
    first, second = await module_rt.info(one), await module_rt.info(other)
    with trace.get_tracer("test").start_as_current_span("program"):
        assert await one.ask(other, b"x") == 2
    program = await folder.span("program", "INTERNAL")
    client = await folder.child(program, "Worker/ask", "CLIENT")
    server = await folder.child(client, "Worker/ask", "SERVER")
    nested = await folder.child(server, "Worker/double", "CLIENT")
    last = await folder.child(nested, "Worker/double", "SERVER")
    assert [span.pid for span in (server, nested, last)] == [first.pid, first.pid, second.pid]
    assert client.attributes == {
        "rpc.system": "aiodaft",
        "rpc.service": "Worker",
        "rpc.method": "ask",
        "aiodaft.actor": first.name,
    }
    assert last.attributes["aiodaft.actor"] == second.name
    assert last.attributes["aiodaft.node"] == second.node
    assert {span.status for span in folder.spans()} == {"UNSET"}


async def test_errors_streams_tells_and_large_values_are_told_apart(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    one, other = await module_rt.spawn(Worker), await module_rt.spawn(Worker)
    with pytest.raises(ValueError, match="it must fail"):
        await one.fail()
    for kind in ("CLIENT", "SERVER"):
        failed = await folder.span("Worker/fail", kind)
        assert (failed.status, failed.attributes["error.type"]) == ("ERROR", "ValueError")
    for stream, method in ((one.count(3), "count"), (one.steps(3), "steps")):
        assert [item async for item in stream] == [0, 1, 2]
        await folder.child(await folder.span(f"Worker/{method}", "CLIENT"), f"Worker/{method}", "SERVER")
    one.double.tell(b"")
    await folder.child(await folder.span("Worker/double", "PRODUCER"), "Worker/double", "CONSUMER")
    assert await other.ask(one, b"") == 0
    # From the producer to the consumer.
    name = (await module_rt.info(other)).name
    await other.double(one.double(bytes(1 << 20))).ready()
    client = await folder.span("Worker/double", "CLIENT", lambda span: span.attributes["aiodaft.actor"] == name)
    transfer = await folder.child(client, "transfer", "INTERNAL")
    assert transfer.attributes["aiodaft.bytes"] == 2 << 20


async def test_an_error_without_a_text_comes_to_its_caller_and_ends_both_spans(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    one = await module_rt.spawn(Worker)
    with pytest.raises(Unprintable):
        await one.fail_unprintably()
    client = await folder.span("Worker/fail_unprintably", "CLIENT")
    server = await folder.child(client, "Worker/fail_unprintably", "SERVER")
    assert [(span.status, span.attributes["error.type"]) for span in (client, server)] == [("ERROR", "Unprintable")] * 2


async def test_calls_that_are_cancelled_and_streams_that_are_left_are_no_failures(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    one = await module_rt.spawn(Worker)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.hold(), 0.1)
    async with aclosing(one.count(1000)) as numbers:
        assert await anext(numbers) == 0
    for method in ("hold", "count"):
        client = await folder.span(f"Worker/{method}", "CLIENT")
        server = await folder.child(client, f"Worker/{method}", "SERVER")
        found = [(span.status, span.attributes["error.type"]) for span in (client, server)]
        assert found == [("UNSET", "cancelled")] * 2


async def test_a_run_of_a_graph_is_a_span_with_its_steps(module_rt: aiodaft.Runtime, folder: SpanFolder) -> None:
    one, other = await module_rt.spawn(Worker), await module_rt.spawn(Worker)
    graph = aiodaft.compile(lambda x: other.double(one.double(x)))
    for run in (1, 2):
        with trace.get_tracer("test").start_as_current_span(f"program {run}"):
            assert await graph(b"x") == b"xxxx"
        client = await folder.child(await folder.span(f"program {run}", "INTERNAL"), "run of a graph", "CLIENT")
        while len(steps := [span for span in folder.spans() if span.parent == client.id]) < 2:
            pass
        assert [(step.name, step.kind) for step in steps] == [("Worker/double", "SERVER")] * 2


async def test_a_run_that_fails_ends_its_span_once(
    module_rt: aiodaft.Runtime, folder: SpanFolder, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = await module_rt.spawn(Worker), await module_rt.spawn(Worker)
    async with aiodaft.compile(lambda: [one.fail(), other.fail()]) as graph:
        for failed in graph():
            with pytest.raises(ValueError, match="it must fail"):
                await failed
    assert (await folder.span("run of a graph", "CLIENT")).status == "ERROR"
    # The SDK warns of a second end, which would be over by now.
    await one.double(b"")
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_a_trace_from_outside_and_baggage_come_to_the_libraries_in_an_actor(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    one = await module_rt.spawn(Worker)
    with aiodaft.telemetry.trace_context(HEADERS) as outside:
        trace_id, span_id, user = await one.ids()
    assert outside is not None
    assert (trace_id, user) == (outside.trace_id, "7")
    client = await folder.span("Worker/ids", "CLIENT")
    assert (client.trace, client.parent) == (outside.trace_id, outside.span_id)
    assert (await folder.child(client, "Worker/ids", "SERVER")).id == span_id
    # As a program with OpenTelemetry says it.
    token = context.attach(baggage.set_baggage("user", "8"))
    try:
        with trace.get_tracer("test").start_as_current_span("program"):
            assert (await one.ids())[2] == "8"
        # Without a span of its own.
        assert await one.user() == "8"
        with aiodaft.telemetry.trace_context():
            assert await one.user() == "8"
    finally:
        context.detach(token)


async def test_spans_and_a_trace_are_recorded_at_the_same_time(
    module_rt: aiodaft.Runtime, folder: SpanFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, one = tmp_path_factory.mktemp("trace") / "run.json", await module_rt.spawn(Worker)
    async with module_rt.trace(path):
        await one.double(bytes(1 << 20)).ready()
    assert any(event.get("name") == "Worker.double" for event in json.loads(path.read_text())["traceEvents"])
    client = await folder.span("Worker/double", "CLIENT")
    await folder.child(client, "Worker/double", "SERVER")
    await one.double(bytes(1 << 20)).ready()
    # Transfers still are spans after the trace.
    while len([span for span in folder.spans() if span.name == "transfer"]) < 2:
        pass


async def test_actors_work_without_telemetry_where_it_cannot_be_set_up(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    # This process has been set up, by the runtime of the module.
    with listening() as ear:
        async with aiodaft.Runtime(preload=(), telemetry=fail) as rt:
            assert await (await rt.spawn(Worker)).double(b"x") == b"xx"
            assert "OSError: no collector answers" in await ear.hears("could not be set up")


async def test_spans_are_sent_before_the_process_of_an_actor_ends(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    async with aiodaft.Runtime(preload=(), telemetry=set_up_slow) as rt:
        worker = await rt.spawn(Worker)
        await worker.double(b"x")
        assert [span for span in folder.spans() if span.kind == "SERVER"] == []
        await rt.stop(worker)
        assert [span.name for span in folder.spans() if span.kind == "SERVER"] == ["Worker/double"]


async def test_collectives_are_spans_of_the_processes_that_take_part(
    module_rt: aiodaft.Runtime, folder: SpanFolder
) -> None:
    async with module_rt.group(2, Worker) as group:
        with trace.get_tracer("test").start_as_current_span("program"):
            assert await aiodaft.all_reduce(group.all(Worker.rank)) == [1, 1]
    program = await folder.span("program", "INTERNAL")
    parts = [span for span in folder.spans() if span.name == "all_reduce"]
    assert [(part.kind, part.parent) for part in parts] == [("INTERNAL", program.id)] * 2


async def test_without_telemetry_no_code_of_it_is_loaded() -> None:
    async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Worker) as worker:
        assert not await worker.loaded()


async def test_a_setup_that_other_processes_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"package.module:function" is needed'):
        aiodaft.Runtime(telemetry="set_up")
    with pytest.raises(ValueError, match="no code is sent"):
        aiodaft.Runtime(telemetry=set_up, codec="msgpack")
    aiodaft.Runtime(telemetry="span_files:set_up", codec="msgpack")
