"""The trace that calls are part of, as other programs, proxies and tracing tools know it: W3C Trace Context."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from aiodaft._protocol.diagnostics.trace import TraceContext, read_headers
from aiodaft._runtime.platform.tasks import current_terms, deadline_of, terms_of, trace_of, under

__all__ = ["TraceContext", "current_trace_context", "trace_context"]


@contextmanager
def trace_context(trace: Mapping[str, str] | TraceContext | None = None) -> Generator[TraceContext | None]:
    """Make the calls in the block part of a trace, and all that these call, at any depth and in any process.

    Tells, streams and runs of compiled graphs are calls, too. Log records of actors have the ids of the trace.

    Args:
        trace: The headers of an HTTP request, of which `traceparent`, `tracestate` and `baggage` count; or the context
            itself. Default: a new trace. Of headers that are in no trace, or not valid, the calls are in none.

    Returns:
        The context; None if the headers have none.

    Raises:
        ValueError: A context that is not valid.
    """
    if trace is None:
        trace = TraceContext(f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01")
    found = read_headers(trace.headers() if isinstance(trace, TraceContext) else trace)
    if found is None and isinstance(trace, TraceContext):
        raise ValueError(f"{trace.traceparent!r:.80} is no traceparent, such as 00-<32 hex digits>-<16 hex digits>-01")
    with under(terms_of(deadline_of(current_terms.get()), found)):
        yield found


def current_trace_context() -> TraceContext | None:
    """The trace that calls made here are part of; None without one. In a method: that of the call that it serves."""
    return trace_of(current_terms.get())
