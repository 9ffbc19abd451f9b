"""The cost of trace contexts and of spans of OpenTelemetry: nothing where there are none."""

from __future__ import annotations

from importlib.util import find_spec

from aiodaft.runtime import Runtime
from aiodaft.telemetry import trace_context

from .results import Bench
from .tracing import compare_lines, open_lines


async def run(bench: Bench) -> None:
    """Measure calls and runs of a graph, next to those of a runtime without any of this."""
    async with Runtime() as never:
        floor = await open_lines(never)
        async with Runtime() as rt:
            ours = await open_lines(rt)
            with trace_context() as context:
                await ours.step(1)
                await ours.graph(1)
            await compare_lines(bench, ours, floor, "after a trace context", "never in one", cheap=True)
            inside = "in a trace context"
            await compare_lines(bench, ours, floor, inside, "in none", around=lambda: trace_context(context))
        if find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None:
            async with Runtime(telemetry="benchmarks.span_sink:set_up") as rt:
                await compare_lines(bench, await open_lines(rt), floor, "with spans", "without telemetry")
