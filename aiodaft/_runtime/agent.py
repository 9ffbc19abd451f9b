"""The agent, an actor in every process, by which the others make and stop actors there and share refs; calls to it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.calls.mailbox import BoundedMailbox
from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.diagnostics.failures import CallAt, Waiting
from aiodaft._protocol.diagnostics.trace import ProcessTrace
from aiodaft._protocol.graphs.listing import ValueNote
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import AGENT, FIRST_USER_ACTOR, ActorId, CallId, PeerId, epoch_of, incarnation, node_of
from aiodaft._runtime.actors.host import Enlisted, Fence, Host, end_background
from aiodaft._runtime.actors.hosted_actor import Birth, HostedActor, current_call, serving
from aiodaft._runtime.calls.call import Caller, CallState, Request, Target
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.diagnostics.attach import Visits
from aiodaft._runtime.diagnostics.process_view import (
    ActorView,
    Deadlocks,
    ProcessView,
    Viewer,
    look_at_actor,
    stack_here,
)
from aiodaft._runtime.diagnostics.tracing import Tracing
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.logs.options import set_levels
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.linux import clock_id
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.definitions import Origin, check_origin, origin_of
from aiodaft._runtime.serialization.errors import add_note, needs_loop
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, DaftError, WaitingCall
from aiodaft.methods import MethodSpec, Options, PlainMethods, method, specs_of
from aiodaft.ref import Ref
from aiodaft.stack import ProcessStack

_IN_CONSTRUCTOR: Final = (
    "a constructor runs on the actor's thread, without an event loop: make tasks and what else needs the loop in "
    "`async def __aenter__(self)`, which runs before the first call, and end them in `async def __aexit__`"
)

# The actor that is made or left here.
attended: ContextVar[HostedActor | None] = ContextVar("aiodaft_attended", default=None)


class Ways(Protocol):
    def connect(self, remote: PeerId) -> None: ...

    async def answer_with_stream(self, remote: PeerId, number: int) -> None: ...

    async def lose_node(self, name: str, process: PeerId | None) -> None: ...

    def vacate(self, actor: ActorId, reason: str) -> None: ...

    @property
    def fence(self) -> Fence: ...


class Agent(Actor):
    def __init__(
        self,
        host: Host,
        objects: Objects,
        graphs: Graphs,
        deadlocks: Deadlocks,
        ways: Ways,
        followers: Followers,
        tracing: Tracing,
    ) -> None:
        self._host = host
        self._objects = objects
        self._graphs = graphs
        self._deadlocks = deadlocks
        self._ways = ways
        self._followers = followers
        self._tracing = tracing
        self._enlisted = Enlisted()
        host.process.provide(Enlisted, self._enlisted)

    @method
    async def host(
        self,
        actor: int,
        label: str,
        max_queue: int | None,
        follow: bool | None,
        origin: Origin | None,
        cls: type,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[float, tuple[str, ...]] | None:
        """Make an actor here. Its constructor runs on the actor's own thread, so that it does not stall the loop.

        The number of the attempt is the epoch of the incarnation. `follow`: see `Birth`. `origin` is where the program
        has the class from. Returns `Shared.imported`.
        """
        if origin is not None:
            check_origin(cls, origin, label, node_of(self._host.process.id))
        epoch = serving().attempt
        first = not self._has_actors()
        if first:
            self._host.on_first(label, epoch)
        specs = specs_of(cls) if issubclass(cls, Actor) else {}
        find_spec = specs.get if issubclass(cls, Actor) else PlainMethods(cls).find
        hosted = HostedActor(self._host, incarnation(ActorId(actor), epoch), label, find_spec)
        hosted.birth = Birth(cls, serving().caller, follow)
        if max_queue is not None or any(spec.rules.max_queue is not None for spec in specs.values()):
            hosted.mailbox = hosted.bounds = BoundedMailbox(max_queue)
        try:
            attended.set(hosted)
            hosted.instance = await hosted.thread.run(partial(_construct, hosted, cls, args, kwargs))
            await hosted.enter_instance()
            if epoch and issubclass(cls, Actor):
                await _tell_restarted(hosted, cls, epoch)
        except BaseException as error:
            hosted.thread.close()
            self._enlisted.forget(hosted.id)
            await end_background(hosted)
            if hosted.stop_spawned is not None:
                await hosted.stop_spawned()
            process = self._host.process
            if needs_loop(error):
                add_note(error, _IN_CONSTRUCTOR)
            add_note(error, f"raised while {label} was made (pid {process.pid}, {process.options.node})")
            raise
        self._host.add(hosted)
        return self._host.imported() if first else None

    @method
    async def enlist(self, actor: int, roster: Roster[Any], rank: int, members: tuple[Any, ...]) -> None:
        """Tell an actor that is here, or that the next call makes, of its group; the owner of the group does."""
        self._enlisted.enlist(ActorId(actor), replace(roster, members=members), rank)

    @method
    async def renew(self, actor: int, epoch: int, since: int) -> bool:
        """Tell an actor that its group has a new epoch; False: it has to be told of the members as well."""
        return self._enlisted.renew(ActorId(actor), epoch, since)

    @method
    async def discharge(self, actor: int) -> None:
        """Tell an actor that it has left its group; the owner of the group does, before it stops the actor."""
        self._enlisted.discharge(ActorId(actor))

    @method
    async def stop(self, actor: int, reason: str, grace: float, mover: str = "") -> None:
        """Stop an actor; see `HostedActor.stop`. Does nothing if it is gone.

        If its owner, the `mover`, moves it to another process, this returns when all that are connected know.
        """
        hosted = self._host.actors.get(ActorId(actor))
        if hosted is None:
            self._enlisted.forget(ActorId(actor))
        else:
            told = [agent.left(mover, actor) for agent in self._others()] if mover else []
            attended.set(hosted)
            try:
                await hosted.stop(reason, grace, moves=bool(mover))
                await end_background(hosted)
                if hosted.stop_spawned is not None:
                    await hosted.stop_spawned()
            finally:
                self._host.remove(hosted)
                self._enlisted.forget(hosted.id)
                if serving().caller != self._host.process.options.owner:
                    # A caller that dies now cannot tell the node any more. With the owner, this process ends, too.
                    self._ways.vacate(hosted.id, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._host.process.grace):
                    await asyncio.gather(*told, *self._hand_over_trace(), return_exceptions=True)

    def _hand_over_trace(self) -> list[Ref[None]]:
        """Give away the trace that was recorded here: the process ends when its last actor has left."""
        session = self._tracing.session
        if session is None or self._has_actors():
            return []
        recorded = self._tracing.end()
        return (
            [] if recorded is None else [agent_of(self._followers.caller, session[0]).take_trace(session[1], recorded)]
        )

    def _has_actors(self) -> bool:
        return any(actor >= FIRST_USER_ACTOR for actor in self._host.actors)

    def _others(self) -> list[Agent]:
        caller = self._followers.caller
        return [agent_of(caller, remote) for remote, there in caller.connections.items() if there.is_up]

    @method
    async def left(self, owner: str, actor: int) -> None:
        self._followers.left(PeerId(owner), ActorId(actor), serving().caller)

    @method
    async def report(self, actor: int) -> tuple[ActorView, int]:
        hosted = self._host.actors.get(ActorId(actor))
        if hosted is None:
            raise ActorDied("the actor was stopped", executed=False)
        return look_at_actor(hosted), self._objects.store.stored_bytes()

    @method(ordered=False)
    async def look(self) -> ProcessView:
        return self._host.process.part(Viewer).look()

    @method(ordered=False)
    async def answer(self) -> None: ...

    @method(ordered=False)
    async def connect(self, remote: str) -> None:
        """Connect to a process that cannot connect to this one: this one is in no node."""
        self._ways.connect(PeerId(remote))

    @method(ordered=False)
    async def open_stream(self, number: int) -> None:
        """Open a stream for payload to the calling process, for the same reason; it has asked for it under a number."""
        await self._ways.answer_with_stream(serving().caller, number)

    @method(ordered=False)
    async def lose_node(self, name: str, process: str | None) -> None:
        await self._ways.lose_node(name, None if process is None else PeerId(process))

    @method(ordered=False)
    async def prolong(self, until: float) -> None:
        self._ways.fence.prolong(until)

    @method(ordered=False)
    async def guard(self, actor: int, until: float) -> None:
        """An actor has got a name: it serves only under a lease."""
        self._ways.fence.prolong(until)
        hosted = self._host.actors.get(ActorId(actor))
        if hosted is not None:
            self._ways.fence.guard(hosted)

    @method
    async def set_levels(self, levels: dict[str, int]) -> None:
        set_levels(levels)

    # Deadlocks and stacks. These calls wait for nothing, and need no turn.

    @method(ordered=False)
    async def investigate(self, roots: list[CallAt]) -> None:
        """Search for a deadlock among calls that have blocked others for a while; asked of the controller."""
        self._deadlocks.investigate(roots)

    @method(ordered=False)
    async def waits_of(self, calls: list[CallAt]) -> list[Waiting | None]:
        return [self._deadlocks.waits.look(call) for call in calls]

    @method(ordered=False)
    async def give_up(self, at: CallAt, waiting: Waiting, story: str, cycle: tuple[WaitingCall, ...]) -> None:
        self._deadlocks.give_up(at, waiting, story, cycle)

    @method(ordered=False)
    async def stack(self) -> ProcessStack:
        return stack_here(self._deadlocks.waits)

    @method(ordered=False)
    async def visited(self, fork_server: int) -> None:
        """A command wants to ask something; the node that this program is attached to tells it."""
        visits = self._host.process.find(Visits)
        if visits is not None:
            visits.begin(fork_server)

    @method
    async def begin_trace(self, collector: str, number: int, limit: int) -> bool | None:
        """Record for a process; before the first actor is made here if that process, or one that it told, makes it.

        Returns:
            Whether there are actors here whose calls are recorded; None if this process records for another one.
        """
        return self._has_actors() if self._tracing.begin(PeerId(collector), number, limit) else None

    @method(ordered=False)
    async def end_trace(self, collector: str, number: int) -> ProcessTrace | None:
        return self._tracing.end() if self._tracing.session == (collector, number) else None

    @method(ordered=False)
    async def take_trace(self, number: int, recorded: ProcessTrace) -> None:
        if self._tracing.session == (self._host.process.id, number):
            self._tracing.handed_over.append(recorded)

    @method(ordered=False)
    async def clock(self) -> tuple[str, float]:
        return clock_id(), self._host.process.env.monotonic()

    @method
    async def install(self, number: int, plan: Opaque) -> None:
        await self._graphs.install(serving().caller, number, plan.content)

    @method
    async def uninstall(self, number: int) -> None:
        self._graphs.uninstall(serving().caller, number)

    @method(ordered=False)
    async def step_failed(self, number: int, run: int, why: DaftError) -> None:
        self._graphs.step_failed(number, run, why)

    @method(ordered=False)
    async def run_failed(self, number: int, run: int, why: DaftError) -> None:
        self._graphs.run_failed(serving().caller, number, run, why)

    @method(ordered=False)
    async def edge_cut(self, number: int, receiver: str, why: DaftError) -> None:
        self._graphs.edge_cut(number, serving().caller, PeerId(receiver), why)

    @method(ordered=False)
    async def edge_failed(self, number: int, sender: str, why: DaftError) -> None:
        self._graphs.edge_failed(serving().caller, number, PeerId(sender), why)

    @method
    async def graph_notes(self, number: int) -> dict[int, ValueNote]:
        return self._graphs.notes(serving().caller, number)

    @method
    async def borrow(self, number: int) -> None:
        self._objects.refs.lend(CallId(number), serving().caller)

    @method
    async def give_back(self, number: int) -> None:
        self._objects.refs.take_back(CallId(number), serving().caller)

    @method
    async def cancel(self, number: int) -> None:
        state = self._objects.refs.find(CallId(number))
        if state is not None:
            state.cancel(f"{serving().caller} asked for it")

    @method
    async def ended(self, number: int) -> bool:
        state = self._objects.refs.find(CallId(number))
        return state is not None and await state.wait_ended()

    @method
    async def unneeded(self, actor: int = 0) -> None:
        """Wait until no other process needs a value that this one stores, or a ref that it owns.

        If an actor is given, return at once if this process goes on without it, for others.
        """
        if any(other >= FIRST_USER_ACTOR and other != actor for other in self._host.actors if actor):
            return
        while self._objects.store.entries or self._objects.refs.are_lent:
            await self._objects.store.wait_freed()

    @method
    async def unread(self, owner: str, number: int) -> None:
        stored = self._objects.store.entries.get((PeerId(owner), CallId(number)))
        if stored is not None:
            await stored.wait_unread()


def agent_of(caller: Caller, remote: PeerId) -> Agent:
    return cast("Agent", caller.handle(remote, AGENT, f"agent of {remote}", Agent))


def _construct(hosted: HostedActor, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the instance, in the actor's thread, whose context serves no other actor."""
    attended.set(hosted)
    return cls(*args, **kwargs)


async def _tell_restarted(hosted: HostedActor, cls: type, epoch: int) -> None:
    hook: Any = getattr(cls, "on_restart", None)
    if hook is None:
        return
    if inspect.iscoroutinefunction(hook):
        await hook(hosted.instance, epoch)
    else:
        await hosted.thread.run(lambda: hook(hosted.instance, epoch))


def acting() -> HostedActor | None:
    call = current_call.get()
    return attended.get() if call is None or call.hosted.id < FIRST_USER_ACTOR else call.hosted


WHY_STOPPED: Final = "stopped by its owner"


class Enrolment:
    """The place of an actor in a group; the owner of the group changes it.

    Args:
        renew: Gives the group a new epoch.
    """

    def __init__(self, roster: Roster[Any], rank: int, renew: Callable[[], object]) -> None:
        self.roster = roster
        self.rank = rank
        self._renew = renew
        # The roster that the newest incarnation was told.
        self._told: Roster[Any] | None = None
        # The `since` of the members of which it was told.
        self._known: int | None = None

    @property
    def is_behind(self) -> bool:
        told = self._told
        return told is None or (told.epoch, told.is_complete) != (self.roster.epoch, self.roster.is_complete)

    @property
    def knows_members(self) -> bool:
        return self.roster.is_complete and self.roster.since == self._known

    def tell(
        self, caller: Caller, remote: PeerId, actor: ActorId, members: Ref[tuple[Any, ...]] | None = None
    ) -> Ref[None]:
        """Tell the actor, or the process that is about to make it.

        Args:
            members: The members, if more than one actor is told of them: they are encoded once.
        """
        self._told = roster = self.roster
        self._known = roster.since if roster.is_complete else None
        given = roster.members if members is None else members
        told: Ref[None] = agent_of(caller, remote).enlist(actor, replace(roster, members=()), self.rank, given)
        return told

    def tell_epoch(self, caller: Caller, remote: PeerId, actor: ActorId) -> Ref[bool]:
        """Tell the actor, which knows the members, of the epoch. False: it does not know them."""
        self._told = self.roster
        told: Ref[bool] = agent_of(caller, remote).renew(actor, self.roster.epoch, self.roster.since)
        return told

    def doubt(self) -> None:
        self._known = None

    def begin_anew(self) -> None:
        """Give the group a new epoch before the next incarnation, if it may have done something together in this one.

        Else the others could take collectives of the next incarnation for those of the last one.
        """
        if not self.is_behind and self.roster.is_complete:
            self._renew()


class ChildSpec:
    """The recipe of an actor: its class, and the arguments of its constructor.

    A spec that is used again encodes the arguments once. Refs among them are held, and resolved for each use.
    """

    def __init__(
        self,
        cls: type,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_queue: int | None,
        enrolment: Enrolment | None = None,
    ) -> None:
        self.cls = cls
        self.label = label
        self._max_queue = max_queue
        self._args = args
        self._kwargs = kwargs
        self._enrolment = enrolment
        self.follow: bool | None = None
        self._origin: Origin | None = None
        self._request: Request | None = None

    def make(self, caller: Caller, remote: PeerId, actor: ActorId, *, again: bool) -> Ref[Any]:
        if self._enrolment is not None:
            self.begin_anew()
            # Before it is made: its constructor may ask for its rank.
            state_of(self.catch_up(caller, remote, actor)).mark_seen()
        target, spec = Target(caller, remote, AGENT, f"agent of {remote}", None), host_spec(self.cls)
        number = caller.process.next_number()
        state = CallState(target, spec, number)
        if node_of(remote) and self._origin is None:
            # Once: a file that is changed later must not keep the actor from being restarted.
            self._origin = origin_of(self.cls)
        arguments = (actor, self.label, self._max_queue, self.follow, self._origin, self.cls, *self._args)
        request = Request(target, spec, arguments, self._kwargs, number, WANT_REPLY, state)
        request.again, request.attempt, request.stored = again, epoch_of(actor), self._stored
        self._request = request
        caller.sender.submit(request)
        return Ref(state)

    @property
    def is_member(self) -> bool:
        return self._enrolment is not None

    @property
    def is_behind(self) -> bool:
        return self._enrolment is not None and self._enrolment.is_behind

    def begin_anew(self) -> None:
        if self._enrolment is not None:
            self._enrolment.begin_anew()

    def catch_up(self, caller: Caller, remote: PeerId, actor: ActorId) -> Ref[None]:
        assert self._enrolment is not None
        return self._enrolment.tell(caller, remote, actor)

    def made(self) -> None:
        """Let go of the arguments: from the first success on, only their encoding is used."""
        assert self._request is not None
        self._args = self._request.args = ()
        self._kwargs = self._request.kwargs = {}

    @property
    def _stored(self) -> StoredValue | None:
        return None if self._request is None else self._request.stored

    def free(self) -> None:
        stored, self._request = self._stored, None
        if stored is not None:
            stored.release()


async def stop_actor(caller: Caller, target: Target, reason: str, grace: float, *, moves: bool = False) -> bool:
    """Have an actor end its calls within the grace time, and leave its instance. Nothing if it is gone.

    If it moves to another process, calls that have not begun are made again there.

    Returns:
        Whether its process answers. A process that is silent for the two grace times (it is stopped, or a call keeps
        its interpreter or its loop) can only be killed.
    """
    mover = caller.process.id if moves else ""
    stopping = agent_of(caller, target.remote).stop(target.actor, reason, grace, mover)
    state_of(stopping).mark_seen()
    process = caller.process
    # The answer comes when the process has begun to stop the actor.
    answers = await _wait_until(_ask(caller, target), _answer_deadline(process, grace))
    ended = answers and await _wait_until(stopping, process.loop.time() + grace + 2 * process.grace + 1.0)
    if not ended:
        logger.debug("%s does not answer, and is killed", target.label)
    return answers


async def stop_in_turn(caller: Caller, targets: Sequence[Target], reason: str, grace: float) -> list[bool]:
    """Stop actors, each when the one before it has been left. For each of them, see `stop_actor`.

    All are asked at the beginning whether they answer, so the time for that passes once, however many do not.
    """
    asked = [_ask(caller, target) for target in targets]
    deadline = _answer_deadline(caller.process, grace)
    return [
        await _wait_until(answer, deadline) and await stop_actor(caller, target, reason, grace)
        for target, answer in zip(targets, asked, strict=True)
    ]


def _ask(caller: Caller, target: Target) -> Ref[None]:
    answer = agent_of(caller, target.remote).answer()
    state_of(answer).mark_seen()
    return answer


def _answer_deadline(process: Process, grace: float) -> float:
    return process.loop.time() + grace + max(process.grace, process.env.timeouts.answer)


async def _wait_until(ref: Ref[None], deadline: float) -> bool:
    """Wait for a call until a time of the loop's clock. The call is not cancelled, which would take time."""
    with suppress(TimeoutError, DaftError):
        async with asyncio.timeout_at(deadline):
            await ref.ready()
    return ref.done()


def host_spec(cls: type) -> MethodSpec:
    """The method that makes an actor, named in errors by the actor's class."""
    spec = specs_of(Agent)["host"]
    return MethodSpec(cls.__name__, spec.name, spec.fn, Options(spec.rules), hidden=6)
