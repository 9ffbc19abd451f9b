"""Spans of OpenTelemetry: of the calls that a process makes and serves, of runs of graphs, and of large values.

A span of the caller and one of the actor make a call; the context of the first is sent with it, as W3C Trace Context.
The objects at which calls begin are told to make spans, so without telemetry nothing is asked.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import ProxyTracerProvider, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aiodaft._protocol.connections.messages import WANT_NOTHING
from aiodaft._protocol.connections.versions import __version__
from aiodaft._protocol.diagnostics.trace import CANCELLED, FETCHED, Event, TraceContext, is_shown, outcome_of
from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, current_call
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.calls.call import Caller, CallSink, Request
from aiodaft._runtime.graphs.owner import GraphOwner
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.platform.tasks import Recorder, current_terms, deadline_of, terms_of, trace_of, under
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref

_W3C: Final = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_NANOSECONDS: Final = 1e9


def has_provider() -> bool:
    return not isinstance(otel.get_tracer_provider(), ProxyTracerProvider)


def shut_down() -> None:
    with suppress(AttributeError):
        otel.get_tracer_provider().shutdown()  # type: ignore[attr-defined]  # as above


class Spans:
    def __init__(self, caller: Caller, host: Host, inbound: Inbound, graphs: Graphs) -> None:
        self._process = host.process
        self._caller = caller
        self._host = host
        self._inbound = inbound
        self._graphs = graphs
        self._tracer = otel.get_tracer("aiodaft", __version__)

    def begin(self) -> None:
        caller = self._caller
        caller.outgoing = caller.direct = _CallSpans(caller.outgoing, self)
        _shadow(self._host, "add", self._add)
        _shadow(self._inbound.arguments, "fetch", self._fetch)
        _shadow(self._graphs, "open", self._open)
        self._process.recorder = _TransferSpans(self._process.env.monotonic, self._transferred)

    def submit(self, inner: CallSink, request: Request) -> None:
        tells, target = request.mode == WANT_NOTHING, request.target
        kind, attributes = SpanKind.PRODUCER if tells else SpanKind.CLIENT, _of_method(request.spec, target.label)
        if target.actor < FIRST_USER_ACTOR:
            # A part of a collective, in another process or here.
            kind, attributes = SpanKind.INTERNAL, {"aiodaft.process": target.remote}
        with self._making(_name(request.spec), kind, attributes) as span:
            inner.submit(request)
        if tells:
            span.end()
        elif isinstance(request.state, StreamState):
            request.state.watch(functools.partial(_end, span))
        elif isinstance(request.state, RefState):
            request.state.watch(lambda state: _end(span, state.error))

    @contextmanager
    def _making(self, name: str, kind: SpanKind, attributes: dict[str, Any]) -> Generator[Span]:
        here, terms = otel_context.get_current(), current_terms.get()
        if not otel.get_current_span(here).get_span_context().is_valid:
            # The program has begun a trace without OpenTelemetry. It may have baggage nevertheless.
            here = _context_of(trace_of(terms), here)
        span = self._tracer.start_span(name, here, kind, attributes)
        trace = _trace_of(otel.set_span_in_context(span, here)) or trace_of(terms)
        try:
            with under(terms_of(deadline_of(terms), trace)):
                yield span
        except BaseException as error:
            _end(span, error)
            raise

    def _add(self, add: Callable[[HostedActor], None], hosted: HostedActor) -> None:
        if hosted.id >= FIRST_USER_ACTOR:
            find = hosted.find_spec
            hosted.find_spec = functools.cache(lambda name: self._spanned(find(name), hosted.name))
        add(hosted)

    def _spanned(self, spec: MethodSpec | None, actor: str) -> MethodSpec | None:
        if spec is None:
            return None
        fn, name, attributes = spec.fn, _name(spec), _of_method(spec, actor)
        attributes["aiodaft.node"] = self._process.options.node

        @functools.wraps(fn)
        def on_thread(*args: Any, **kwargs: Any) -> Any:
            with self._serving(name, attributes):
                return fn(*args, **kwargs)

        @functools.wraps(fn)
        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            with self._serving(name, attributes):
                return await fn(*args, **kwargs)

        @functools.wraps(fn)
        async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
            with self._serving(name, attributes):
                async with aclosing(fn(*args, **kwargs)) as items:
                    async for item in items:
                        yield item  # noqa: ASYNC119 - the runtime closes it

        @functools.wraps(fn)
        def steps(*args: Any, **kwargs: Any) -> Generator[Any]:
            with self._serving(name, attributes):
                yield from fn(*args, **kwargs)

        spanned = copy(spec)
        if spec.is_stream:
            spanned.fn = stream if inspect.isasyncgenfunction(fn) else steps
        else:
            spanned.fn = on_thread if spec.rules.on_thread else on_loop
        return spanned

    @contextmanager
    def _serving(self, name: str, attributes: dict[str, Any]) -> Generator[None]:
        call, terms = current_call.get(), current_terms.get()
        parent = _context_of(trace_of(terms))
        kind = SpanKind.CONSUMER if call is not None and call.mode == WANT_NOTHING else SpanKind.SERVER
        span = self._tracer.start_span(name, parent, kind, attributes)
        here = otel.set_span_in_context(span, parent)
        attached = otel_context.attach(here)
        try:
            with under(terms_of(deadline_of(terms), _trace_of(here) or trace_of(terms))):
                yield
        except BaseException as error:
            _end(span, error)
            raise
        else:
            span.end()
        finally:
            otel_context.detach(attached)

    def _open(self, open_graph: Callable[..., GraphOwner], *args: Any) -> GraphOwner:
        owner = open_graph(*args)
        _shadow(owner, "start", self._start)
        return owner

    def _start(self, start: Callable[..., dict[int, Ref[Any]]], args: tuple[Any, ...]) -> dict[int, Ref[Any]]:
        with self._making("run of a graph", SpanKind.CLIENT, {"rpc.system": "aiodaft"}) as span:
            refs = start(args)
        left = len(refs)

        def over(state: RefState) -> None:
            nonlocal left
            left -= 1
            if span.is_recording() and (state.error is not None or not left):
                _end(span, state.error)

        for ref in refs.values():
            state_of(ref).watch(over)
        return refs

    def _fetch(self, fetch: Callable[..., None], call: InboundCall, *what: Any) -> None:
        attached = otel_context.attach(_context_of(trace_of(call.terms)))
        try:
            fetch(call, *what)
        finally:
            otel_context.detach(attached)

    def _transferred(self, event: Event) -> None:
        _, began, ended, kind, nbytes, source = event
        if otel.get_current_span().get_span_context().is_valid:
            to_epoch = time.time_ns() - self._process.env.monotonic() * _NANOSECONDS
            attributes = {"aiodaft.bytes": nbytes, "aiodaft.transport": kind, "aiodaft.source": source}
            span = self._tracer.start_span(
                "transfer", attributes=attributes, start_time=int(began * _NANOSECONDS + to_epoch)
            )
            span.end(int(ended * _NANOSECONDS + to_epoch))


class _CallSpans(CallSink):
    def __init__(self, inner: CallSink, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    def submit(self, request: Request) -> None:
        if is_shown(request.target.actor, request.spec.name):
            self._spans.submit(self._inner, request)
        else:
            self._inner.submit(request)


class _TransferSpans(Recorder):
    def __init__(self, now: Callable[[], float], transferred: Callable[[Event], object]) -> None:
        super().__init__(now, 0)
        self._transferred = transferred

    def add(self, event: Event) -> None:
        if event[0] == FETCHED:
            self._transferred(event)


def _shadow(thing: Any, name: str, around: Callable[..., Any]) -> None:
    def shadow(*args: Any) -> Any:
        # A trace may have changed its class meanwhile.
        return around(functools.partial(getattr(type(thing), name), thing), *args)

    setattr(thing, name, shadow)


def _context_of(trace: TraceContext | None, around: Context | None = None) -> Context:
    around = Context() if around is None else around
    return around if trace is None else _W3C.extract(trace.headers(), around)


def _trace_of(context: Context) -> TraceContext | None:
    headers: dict[str, str] = {}
    _W3C.inject(headers, context)
    return TraceContext(**headers) if "traceparent" in headers else None


def _name(spec: MethodSpec) -> str:
    return spec.label.replace(".", "/")


def _of_method(spec: MethodSpec, actor: str) -> dict[str, Any]:
    service, _, method = spec.label.rpartition(".")
    return {"rpc.system": "aiodaft", "rpc.service": service, "rpc.method": method, "aiodaft.actor": actor}


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None and span.is_recording():
        outcome = outcome_of(error)
        span.set_attribute("error.type", outcome)
        if outcome != CANCELLED:
            span.set_status(StatusCode.ERROR)
            with suppress(Exception):
                # A user's `__str__` may raise anything.
                span.set_status(StatusCode.ERROR, str(error))
                span.record_exception(error)
    span.end()
