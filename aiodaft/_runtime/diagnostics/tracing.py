"""Records the events of one process, for `rt.trace()`.

While a trace is recorded, the objects that make and run calls are of the classes here. So programs without a trace run
the same code as if there were none.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiodaft._protocol.calls.mailbox import FETCHING
from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.diagnostics.trace import CANCELLED, UNFINISHED, Event, Key, ProcessTrace, is_shown, outcome_of
from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.ids import AGENT, FIRST_USER_ACTOR, PeerId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, current_call
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.calls.call import Caller, Request
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.graphs.graph_value import Arguments, OwnerRun, Specs
from aiodaft._runtime.graphs.owner import GraphOwner
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.graphs.strand_call import BoundStep, BoundStrand, StrandCall
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.platform.tasks import Recorder
from aiodaft._runtime.process import MSGPACK
from aiodaft.ref import Ref

Tell = Callable[[PeerId, PeerId, int, int], object]


class Tracing:
    def __init__(self, host: Host, outgoing: Outgoing, graphs: Graphs, tell: Tell) -> None:
        self._process = host.process
        self._host = host
        self._outgoing = outgoing
        self._graphs = graphs
        self._tell = tell
        self._limit = 0
        self._names: dict[int, str] = {}
        self._strands: WeakKeyDictionary[BoundStrand, BoundStrand] = WeakKeyDictionary()
        self.now = host.process.env.monotonic
        self._recorder: Recorder | None = None
        self.session: tuple[PeerId, int] | None = None
        self.told: dict[PeerId, str] = {}
        self.handed_over: list[ProcessTrace] = []

    def begin(self, collector: PeerId, number: int, limit: int) -> bool:
        if self.session == (collector, number):
            return True
        if self.session is not None and self.session[0] != collector:
            return False
        # The last trace of the same collector was not ended: this process did not answer in time.
        self.end()
        self.session, self._limit = (collector, number), limit
        self.told, self.handed_over = {}, []
        self._recorder = self._process.recorder = Recorder(self.now, limit, self._process.recorder)
        for part in self._parts():
            watch(part)
        self._names = {hosted.id: hosted.name for hosted in self._host.actors.values()}
        return True

    def end(self) -> ProcessTrace | None:
        recorder = self._recorder
        if recorder is None:
            return None
        for call in self._host.calls():
            self.over(call, self.now(), UNFINISHED)
        for part in self._parts():
            part.__class__ = _PLAIN.get(type(part), type(part))
        self.session = self._recorder = None
        self._process.recorder = recorder.before
        process = self._process
        return ProcessTrace(
            process.id, process.pid, process.options.node, self._names, recorder.events, recorder.dropped
        )

    def _parts(self) -> list[Any]:
        graphs, actors = self._graphs.own.values(), self._host.actors.values()
        return [self._host, self._outgoing, self._graphs, *graphs, *actors]

    def watch_actor(self, hosted: HostedActor) -> None:
        self._names[hosted.id] = hosted.name
        watch(hosted)

    def spread(self, remote: PeerId, label: str) -> None:
        if self.session is not None:
            self.told.setdefault(remote, label)
            self._tell(remote, *self.session, self._limit)

    def add(self, event: Event) -> None:
        if self._recorder is not None:
            self._recorder.add(event)

    def over(self, call: InboundCall, ended: float, outcome: str) -> None:
        if is_shown(call.hosted.id, call.spec.name):
            began = call.since or None
            came = call.came or began or ended
            times = (came, call.complete or began or ended, began, ended)
            what = "run of a graph" if isinstance(call, StrandCall) else call.label
            self.add(trace.ran(times, key_of(call), call.hosted.id, what, outcome))

    def traced(self, strand: BoundStrand) -> BoundStrand:
        found = self._strands.get(strand)
        if found is None:
            found = self._strands[strand] = copy(strand)
            found.steps = [self._traced_step(step, on_thread=strand.rules.on_thread) for step in strand.steps]
            found.last = None if strand.last is None else found.steps[-1]
        return found

    def _traced_step(self, step: BoundStep, *, on_thread: bool) -> BoundStep:
        fn, found = step.fn, copy(step)

        async def timed(instance: Any, *args: Any, **kwargs: Any) -> Any:
            with self._step(step):
                return await fn(instance, *args, **kwargs)

        def timed_on_thread(instance: Any, *args: Any, **kwargs: Any) -> Any:
            with self._step(step):
                return fn(instance, *args, **kwargs)

        found.fn = timed_on_thread if on_thread else timed
        return found

    @contextmanager
    def _step(self, step: BoundStep) -> Generator[None]:
        call, began, outcome = current_call.get(), self.now(), ""
        assert isinstance(call, StrandCall)
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            # A step that begins a segment has waited for its values since the step before.
            came = began if step.segment is None or call.ended is None else call.ended
            run = call.run.key
            call.ended = self.now()
            times, needs = (came, began, began, call.ended), [(*run, slot) for slot in step.slots if slot >= 0]
            actor = call.hosted.id
            self.add(trace.ran(times, (*run, step.index), actor, step.label, outcome, key_of(call), needs))


def key_of(call: InboundCall) -> Key:
    if isinstance(call, StrandCall):
        return *call.run.key, "strand", call.strand.first
    return call.caller, call.number


def _maker() -> tuple[Key, int] | None:
    call = current_call.get()
    return None if call is None or call.hosted.id < FIRST_USER_ACTOR else (key_of(call), call.hosted.id)


class TracedHost(Host):
    def add(self, hosted: HostedActor) -> None:
        super().add(hosted)
        self.process.part(Tracing).watch_actor(hosted)


class TracedActor(HostedActor):
    def deliver(self, call: InboundCall) -> None:
        tracing = self._process.part(Tracing)
        call.came = tracing.now()
        if call.stage is not FETCHING:
            call.complete = call.came
        if isinstance(call, StrandCall):
            call.strand = tracing.traced(call.strand)
        super().deliver(call)

    def ready(self, call: InboundCall) -> None:
        call.complete = self._process.env.monotonic()
        super().ready(call)

    def _end_later(self, call: InboundCall, answer: Callable[..., object] | None = None, given: Any = None) -> None:
        call.ended = self._process.env.monotonic()
        super()._end_later(call, answer, given)

    def _end(self, call: InboundCall, answer: Callable[..., object] | None = None, given: Any = None) -> None:
        tracing = self._process.part(Tracing)
        ended = call.ended if call.rules.on_thread and call.ended is not None else tracing.now()
        is_wanted = call.since and not call.given_up
        super()._end(call, answer, given)
        tracing.over(call, ended, call.outcome or ("" if is_wanted else CANCELLED))

    def _failed(self, call: InboundCall, error: BaseException, ran: bool) -> None:
        call.outcome = outcome_of(error)
        super()._failed(call, error, ran)

    def _fail_late(
        self, call: InboundCall, error: BaseException | None = None, *, executed: bool | None = None
    ) -> None:
        call.outcome = "DeadlineExceeded"
        super()._fail_late(call, error, executed=executed)

    def _withdraw(self, call: InboundCall, *, waits: bool) -> None:
        super()._withdraw(call, waits=waits)
        if waits:
            tracing = self._process.part(Tracing)
            tracing.over(call, tracing.now(), CANCELLED)


class TracedOutgoing(Outgoing):
    def submit_at_once(self, *_: object, **__: object) -> bool:
        return False

    def submit(self, request: Request) -> None:
        tracing, target, name = self._process.part(Tracing), request.target, request.spec.name
        if target.actor == AGENT and name == "host":
            tracing.spread(target.remote, request.args[1])
        if request.recorded or not is_shown(target.actor, name):
            super().submit(request)
            return
        request.recorded = True
        began, maker = tracing.now(), _maker()
        needs = [(ref.owner, ref.number) for ref in map(state_of, _refs_in(request))]
        super().submit(request)
        times, key = (began, tracing.now()), (self._process.id, request.number)
        tracing.add(trace.submitted(times, key, request.spec.label, target.label, maker, needs))


def _refs_in(request: Request) -> list[Ref[Any]]:
    found: list[Ref[Any]] = []
    for arg in (*request.args, *request.kwargs.values()):
        found += [one for one in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(one, Ref)]
    return found


class TracedGraphs(Graphs):
    def open(self, dataflow: Dataflow[Arguments], specs: Specs, max_in_flight: int) -> GraphOwner:
        owner = super().open(dataflow, specs, max_in_flight)
        watch(owner)
        return owner


class TracedGraphOwner(GraphOwner):
    def _send(self, run: OwnerRun) -> None:
        process = self._context.process
        tracing, maker = process.part(Tracing), _maker()
        began = tracing.now()
        super()._send(run)
        assert run.deployment is not None
        key = process.id, run.deployment.number, run.number
        times, what = (began, tracing.now()), f"run {run.number} of a graph"
        tracing.add(trace.submitted(times, key, what, "", maker, ()))


_TRACED: Final[dict[type, type]] = {
    Host: TracedHost,
    HostedActor: TracedActor,
    Outgoing: TracedOutgoing,
    Graphs: TracedGraphs,
    GraphOwner: TracedGraphOwner,
}
_PLAIN: Final = {traced: plain for plain, traced in _TRACED.items()}


def watch(part: Any) -> None:
    part.__class__ = _TRACED.get(type(part), type(part))


Setup = Callable[[], object] | str

_NAMED: Final = b":"


def packed_setup(setup: Setup | None, codec: str) -> bytes:
    """A setup as bytes, for other processes; none for None.

    Raises:
        TypeError: It is no function and no name.
        ValueError: It is a function, and processes do not unpickle.
    """
    if setup is None:
        return b""
    if isinstance(setup, str):
        module, _, name = setup.partition(":")
        if not (module and name):
            raise ValueError(f'telemetry={setup!r}: "package.module:function" is needed')
        return _NAMED + setup.encode()
    if not callable(setup):
        raise TypeError(f"telemetry={setup!r:.80}: a function that sets up OpenTelemetry is needed, or where it is")
    if codec == MSGPACK:
        raise ValueError('with codec="msgpack" no code is sent: telemetry is "package.module:function" then')
    import cloudpickle  # noqa: PLC0415 - slow to load

    return bytes(cloudpickle.dumps(setup))


def set_up_telemetry(packed: bytes) -> None:
    """Set up OpenTelemetry in this process, unless it has a tracer provider.

    Raises:
        ImportError: OpenTelemetry is not installed here.
        Exception: An error of the setup.
    """
    try:
        from aiodaft._runtime.diagnostics.spans import has_provider  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("telemetry needs OpenTelemetry: pip install 'aiodaft[otel]'") from error
    if not has_provider():
        _unpacked(packed)()


def begin_telemetry(caller: Caller, host: Host, inbound: Inbound, graphs: Graphs) -> None:
    from aiodaft._runtime.diagnostics.spans import Spans  # noqa: PLC0415 - optional

    Spans(caller, host, inbound, graphs).begin()


def _unpacked(packed: bytes) -> Callable[[], object]:
    found: Callable[[], object]
    if packed.startswith(_NAMED):
        module, _, name = packed.removeprefix(_NAMED).decode().partition(":")
        found = attrgetter(name)(import_module(module))
    else:
        found = pickle.loads(packed)
    return found


def end_telemetry() -> None:
    try:
        from aiodaft._runtime.diagnostics.spans import shut_down  # noqa: PLC0415 - optional
    except ImportError:
        return
    shut_down()
