"""The directory of the actors that are restarted: an actor of their owner, which callers ask where they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Literal, Protocol, cast

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ActorId, PeerId, node_of
from aiodaft._protocol.node.worker import Health
from aiodaft._protocol.numbers import Latest
from aiodaft._protocol.supervision import REACHABLE, ChildEvent, ChildState, Fate, Restart, fate_of
from aiodaft._runtime.actors.host import Rosters
from aiodaft._runtime.agent import WHY_STOPPED
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget, PinnedTarget
from aiodaft._runtime.diagnostics.process_view import ChildView, class_in
from aiodaft._runtime.logs.options import Written
from aiodaft._runtime.node.nodes import Nodes
from aiodaft._runtime.peer import OwnerContact
from aiodaft._runtime.serialization.errors import copy_error, decode_error, encode_error
from aiodaft._runtime.supervision.supervisor import Child, Supervisor
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, RestartLimitReached
from aiodaft.methods import method

_MAX_DEAD: Final = 64


class Root(Protocol):
    """The outermost scope of an owner: the reports to it, and the actors in it."""

    def all_actors(self) -> Iterable[Target]: ...

    def fail(self, error: BaseException, what: str) -> None: ...

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None: ...

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None: ...


class Directory(OwnerContact):
    def __init__(self, caller: Caller, nodes: Nodes, root: Root) -> None:
        self._caller = caller
        self._nodes = nodes
        self._root = root
        self.on_over: Callable[[ActorId], object] = lambda number: None
        self.on_shown: Callable[[Sequence[Written]], Awaitable[None]]
        self._children: dict[ActorId, Child] = {}
        self._ended = Latest[ActorId, DaftError](caller.process.env.remembered)
        # Those of them that were neither stopped nor allowed to end.
        self._missed = Latest[ActorId, ChildView](_MAX_DEAD)

    def new_supervisor(self, policy: Restart, grace: float, fail: Callable[[BaseException, str], object]) -> Supervisor:
        made = Supervisor(self._caller, self._nodes, self.end, policy, grace, fail)
        made.on_up = self._came_up
        return made

    @method
    async def locate(self, number: int, wait: bool) -> Location:
        child = self._children.get(ActorId(number))
        if child is None:
            ended = self._ended.get(ActorId(number)) or ActorDied("the actor was stopped", executed=False)
            return Location(NOWHERE, ActorId(number), ended)
        while wait and child.state not in {*REACHABLE, ChildState.OVER}:
            await child.changed()
        if child.state in REACHABLE:
            return child.place
        return Location(NOWHERE, child.place.actor, child.target.ended if child.state is ChildState.OVER else None)

    @method(ordered=False)
    async def roster_after(self, group: str, epoch: int, since: int) -> Roster[Any] | None:
        cell = self._caller.process.part(Rosters).find(group)
        if cell is None:
            return None
        found = await cell.after(epoch)
        return replace(found, members=()) if found.since == since else found

    async def host_of(self, target: Target) -> PeerId:
        """The process of any actor; that of a supervised one once it is up.

        Raises:
            ActorDied: The actor is over.
        """
        if not isinstance(target, FollowingTarget):
            return target.remote
        found = await target.locate(wait=True)
        if found.ended is not None:
            raise copy_error(found.ended)
        return found.peer

    async def last_process(self, target: Target) -> PeerId | None:
        """The process of any actor, or the last one of an actor that is restarted; None if it is gone."""
        child = self.find(target)
        if child is not None:
            return child.place.peer
        if isinstance(target, FollowingTarget):
            found = await target.locate(wait=False)
            return found.peer if found.ended is None and found.peer != NOWHERE else None
        return None if target.health() is Health.LOST else target.remote

    def find(self, target: Target) -> Child | None:
        ours = isinstance(target, FollowingTarget) and target.owner == self._caller.process.id
        return self._children.get(cast("FollowingTarget", target).number) if ours else None

    async def address(self, number: ActorId) -> Target:
        """The target for handles of an actor, as its policy says, once it is up.

        Raises:
            ActorDied: The actor is over.
        """
        found = await self.locate(number, wait=True)
        child = self._children.get(number)
        if found.ended is not None or child is None:
            raise copy_error(found.ended or ActorDied("the actor was stopped", executed=False))
        return child.target if child.supervisor.policy.follow else PinnedTarget(child.target, found)

    def begin(self, child: Child) -> Child:
        self._children[child.number] = child
        return child

    def forget(self, child: Child) -> None:
        self._children.pop(child.number, None)
        child.supervisor.forget(child)
        child.handle(ChildEvent.ENDED)
        child.spec.free()

    def end(self, child: Child, error: DaftError) -> None:
        if child.number not in self._children:
            return
        self.forget(child)
        self._ended[child.number] = error
        if child.final is None or isinstance(child.final, RestartLimitReached):
            self._missed[child.number] = _view(child, "dead", error)
        child.target.end(error)
        self.on_over(child.number)
        # Before callers have the error: the resources of the actor are free when they ask.
        self._nodes.tell_to_vacate(child.place.peer, child.place.actor, str(error))

    @method
    async def process_ended(self, peer: str, error: OutcomeUnknown, wanted: bool) -> None:
        self.ended(PeerId(peer), error, wanted=wanted)

    def ended(self, peer: PeerId, error: OutcomeUnknown, *, wanted: bool) -> None:
        if self._caller.process.closed is not None:
            return
        for child in [child for child in self._children.values() if child.place.peer == peer]:
            match fate_of(child.state, wanted=wanted):
                case Fate.NOT_MADE:
                    child.crash = error
                case Fate.RESTART:
                    child.supervisor.crashed(child, error)
                case Fate.OVER:
                    self.end(child, error)
                case Fate.NOTHING:
                    pass

    def look(self) -> list[ChildView]:
        known = [
            _view(child, "up" if child.state in REACHABLE else "restarting", child.last_error)
            for child in self._children.values()
        ]
        return [*known, *islice(self._dead(), _MAX_DEAD)]

    def _dead(self) -> Iterator[ChildView]:
        for target in self._root.all_actors():
            if isinstance(target, FollowingTarget):
                if target.number in self._missed:
                    yield self._missed[target.number]
            elif not target.stopped and (error := self.death_of(target)) is not None:
                name = target.label
                yield ChildView(target.remote, name, class_in(name), "dead", 0, 0, encode_error(error))

    def death_of(self, target: Target) -> BaseException | None:
        if isinstance(target, FollowingTarget):
            return target.ended
        connection = self._caller.connections.get(target.remote)
        if connection is None or connection.explanation is None or not connection.explanation.done():
            return None
        may_live = connection.renewable and self._nodes.is_member(node_of(target.remote))
        return None if may_live else connection.explanation.result()

    def processes_on(self, name: str) -> set[PeerId]:
        return {
            child.place.peer
            for child in self._children.values()
            if child.state in REACHABLE and node_of(child.place.peer) == name
        }

    def node_gone(self, name: str, error: OutcomeUnknown) -> None:
        lost = [child for child in self._children.values() if node_of(child.place.peer) == name]
        for child in lost:
            # It may run on there, if only the others do not hear the node.
            self._nodes.tell_to_vacate(child.place.peer, child.place.actor, str(error), keep=True)
        for peer in dict.fromkeys(child.place.peer for child in lost):
            self.ended(peer, error, wanted=False)

    @method
    async def node_draining(self, node: str, grace: float) -> None:
        if self._nodes.server_of(node_of(PeerId(node))) != node:
            return
        self._nodes.draining[PeerId(node)] = self._caller.process.env.monotonic() + grace
        for child in list(self._children.values()):
            self._depart(child)

    def _came_up(self, child: Child) -> None:
        """An actor is up: perhaps on a node that is being drained, or with another node than its guests."""
        for other in [other for other in self._children.values() if other is child or other.beside == child.target]:
            self._depart(other)

    def _depart(self, child: Child) -> None:
        if child.state is not ChildState.UP or child.node not in self._nodes.draining:
            return
        host = child.beside
        if host is None:
            child.supervisor.depart(child)
        elif (found := self.find(host)) is not None and found.state is ChildState.UP and found.node != child.node:
            # It goes to where its host is. One whose host stays does so, too.
            child.supervisor.leave_node(child)

    @method
    async def actor_died(self, peer: str, actor: int, error: OutcomeUnknown) -> None:
        self._root.actor_died(PeerId(peer), ActorId(actor), error)

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        self._root.fail(decode_error(encoded), what)

    @method(ordered=False)
    async def show(self, written: Sequence[Written]) -> None:
        await self.on_shown(written)

    def retire(self, target: Target) -> Child | None:
        """Restart an actor no more, at its owner's wish; a restart under way is taken back.

        Returns:
            The child, which has `settled` when the actor is either up or over; None if it is not supervised.
        """
        child = self.find(target)
        if child is None:
            return None
        child.supervisor.leave(child)
        if child.final is None:
            child.final = ActorDied(f"{child.label} was stopped: {WHY_STOPPED}", executed=False)
            child.final.actor = child.label
        child.handle(ChildEvent.NO_MORE)
        if child.state is ChildState.OVER:
            self.end(child, child.final)
        elif child.state is ChildState.ENDING:
            child.interrupt()
        return child

    def close(self, target: Target) -> None:
        child = self.find(target)
        if child is not None and child.final is not None:
            self.end(child, child.final)


def _view(child: Child, state: Literal["up", "restarting", "dead"], error: BaseException | None) -> ChildView:
    encoded = None if error is None else encode_error(error)
    return ChildView(
        child.place.peer, child.label, child.spec.cls.__name__, state, child.epoch, child.restarts, encoded
    )
