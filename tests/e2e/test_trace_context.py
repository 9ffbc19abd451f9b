"""The trace that calls are part of: it goes with them, and only with them."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from log_ear import listening
from tracers import Tracer, trace_here

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "a=b", "Baggage": "=x"}
HERE = f"{TRACE}=x"


async def test_a_trace_goes_with_every_kind_of_call(module_rt: aiodaft.Runtime) -> None:
    one, other = await module_rt.spawn(Tracer), await module_rt.spawn(Tracer)
    beside = await module_rt.on(with_=one).spawn(Tracer)
    restarted = await module_rt.on(restart=aiodaft.Restart()).spawn(Tracer)
    graph = aiodaft.compile(lambda x: one.trace(other.trace_on_thread(), x))
    async with module_rt.group(2, Tracer) as group:
        with aiodaft.telemetry.trace_context(HEADERS) as trace:
            assert trace == aiodaft.telemetry.current_trace_context()
            assert trace is not None
            assert trace.headers() == {name.lower(): value for name, value in HEADERS.items()}
            assert await one.trace() == await one.trace_on_thread() == await restarted.trace() == HERE
            assert await one.trace(other.trace(), {"nested": other.trace()}, bytes(1 << 20)) == HERE
            assert await one.ask(other) == await one.ask(beside) == [HERE] * 4
            assert await one.ask_on_thread(other) == HERE
            assert [item async for item in one.traces(20)] == [HERE] * 20
            assert await group.all(Tracer.trace) == [HERE] * 2
            assert await group.any(Tracer.trace) == HERE
            one.note.tell()
            async with aiodaft.deadline(60):
                assert await one.ask(other) == [HERE] * 4
            assert await graph(1) == await graph(2) == HERE
        assert await one.notes() == [HERE]
        # It ends with the block, also for connections that were made in it.
        assert trace_here() is None
        assert await one.ask(other) == await other.ask(one) == await beside.ask(other) == [None] * 4
        assert [item async for item in one.traces(2)] == [None] * 2
        assert await group.all(Tracer.trace) == [None] * 2
        assert await graph(3) is None
        async with aiodaft.deadline(60):
            assert await one.ask(other) == [None] * 4


async def test_calls_at_the_same_time_have_traces_of_their_own(module_rt: aiodaft.Runtime) -> None:
    one, other = await module_rt.spawn(Tracer), await module_rt.spawn(Tracer)

    async def trace() -> None:
        with aiodaft.telemetry.trace_context() as trace:
            assert trace is not None
            assert await one.ask(other) == [trace.trace_id] * 4
            with aiodaft.telemetry.trace_context({}) as none:
                assert none is None
                assert await one.ask(other) == [None] * 4
            assert await one.trace() == trace.trace_id

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(trace())


async def test_log_records_have_the_ids_of_their_trace(module_rt: aiodaft.Runtime) -> None:
    one = await module_rt.spawn(Tracer)
    with listening("users.module") as ear, aiodaft.telemetry.trace_context(HEADERS):
        await one.log()
        record = await ear.hears_record("logged in a trace")
        own = logging.makeLogRecord({"msg": "logged here"})
        for found in (record, own):
            fields = json.loads(aiodaft.logs.JsonFormatter().format(found))
            assert (fields["trace_id"], fields["span_id"]) == (TRACE, "b7ad6b7169203331")
    assert "trace_id" not in json.loads(aiodaft.logs.JsonFormatter().format(own))


async def test_a_context_that_is_not_valid_is_refused_and_headers_are_not() -> None:
    with (
        pytest.raises(ValueError, match="'made up' is no traceparent"),
        aiodaft.telemetry.trace_context(aiodaft.telemetry.TraceContext("made up")),
    ):
        pass
    with aiodaft.telemetry.trace_context({"traceparent": "made up"}) as trace:
        assert trace is None
