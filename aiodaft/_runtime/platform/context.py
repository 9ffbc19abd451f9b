"""The terms under which code makes calls, and how they travel along: a deadline, and the trace they are part of."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from aiodaft._protocol.connections.messages import SentTerms
from aiodaft._protocol.diagnostics.trace import Event, TraceContext
from aiodaft.exceptions import DaftError, DeadlineExceeded, RemoteProtocolError


class Recorder:
    """The first events of a process, as many as there is room for. Safe in any thread.

    Args:
        limit: Later events are only counted.
        before: Another recorder, which goes on meanwhile.
    """

    def __init__(self, now: Callable[[], float], limit: int, before: Recorder | None = None) -> None:
        self.now = now
        self.events: list[Event] = []
        self.dropped = 0
        self.before = before
        self._limit = limit

    def add(self, event: Event) -> None:
        if self.before is not None:
            self.before.add(event)
        if len(self.events) < self._limit:
            self.events.append(event)
        else:
            self.dropped += 1


_MICROSECONDS: Final = 1e6


class Terms(NamedTuple):
    deadline: float | None = None
    trace: TraceContext | None = None


# Without terms (None) a call pays nothing.
current_terms: ContextVar[Terms | None] = ContextVar("aiodaft_current_terms", default=None)


class under:  # noqa: N801 - reads as a word of the language: `with under(terms)`
    __slots__ = ("_terms", "_token")

    def __init__(self, terms: Terms | None) -> None:
        self._terms = terms

    def __enter__(self) -> None:
        self._token = current_terms.set(self._terms)

    def __exit__(self, *error: object) -> None:
        current_terms.reset(self._token)


def terms_of(deadline: float | None, trace: TraceContext | None) -> Terms | None:
    return None if deadline is None and trace is None else Terms(deadline, trace)


def deadline_of(terms: Terms | None) -> float | None:
    return None if terms is None else terms.deadline


def trace_of(terms: Terms | None) -> TraceContext | None:
    return None if terms is None else terms.trace


def exceeded(late: str, error: TimeoutError) -> DeadlineExceeded:
    call = None if error.__context__ is None else error.__context__.__cause__
    if isinstance(call, DaftError):
        return DeadlineExceeded(f"{late}: {call}", executed=call.executed)
    return DeadlineExceeded(late)


def sent_terms(terms: Terms, clock: Callable[[], float]) -> SentTerms:
    """The terms in a message. The time is rounded up, so that a deadline passes first where it was set."""
    deadline, trace = terms
    left = None if deadline is None else max(0, math.ceil((deadline - clock()) * _MICROSECONDS))
    return left if trace is None else (left, *trace)


def received_terms(sent: int | tuple[Any, ...], clock: Callable[[], float]) -> Terms:
    if not isinstance(sent, tuple):
        return Terms(clock() + sent / _MICROSECONDS)
    match sent:
        case (int() | None as left, str() as traceparent, str() as tracestate, str() as baggage):
            deadline = None if left is None else clock() + left / _MICROSECONDS
            return Terms(deadline, TraceContext(traceparent, tracestate, baggage))
    raise RemoteProtocolError("a call came with a trace that is none")
