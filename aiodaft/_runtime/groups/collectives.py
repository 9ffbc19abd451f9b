"""Collectives on refs: carries out the plans of `_protocol.groups.collective` by calls between the members' processes.

Every process has a `Collectives` actor. A step of a plan is a call of it, with refs of the step's inputs: values go
from member to member as arguments do, and errors, deaths and cancellations are those of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, TypeAlias, cast

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.groups import collective
from aiodaft._protocol.groups.collective import Cut, Parts, Plan, Step, Work, runs_on_loop
from aiodaft._protocol.ids import COLLECTIVES, NOBODY, PeerId, can_share_memory
from aiodaft._protocol.objects.value import PENDING
from aiodaft._runtime.actors.hosted_actor import serving
from aiodaft._runtime.calls.call import Caller, CallState, Target
from aiodaft._runtime.calls.following import AlwaysBeside, Beside, FollowingTarget, TargetBeside
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.groups.arithmetic import Reducer, alone, cut, joined, nbytes_of, new_memory, no_gradients, reduced
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, OwnerDied, PeerLost
from aiodaft.methods import MethodSpec, method, passes_on, specs_of
from aiodaft.ref import Ref

# The work, the cut and the part of a step, and the number of parts, or their lengths.
Job: TypeAlias = tuple[int, int, int, Parts]


class Collectives(Actor):
    def __init__(self, store: Store) -> None:
        self._allocate = store.empty

    # Unordered: a step of one collective does not wait for the inputs of another.
    @method(ordered=False)
    async def step(self, work: int, how: int, part: int, parts: Parts, op: Reducer, title: str, *inputs: Any) -> Any:
        values = inputs[1::2]
        do = partial(self._do, (work, how, part, parts), inputs[::2], op, title, values)
        if runs_on_loop(Work(work), sum(map(nbytes_of, values)), by_function=callable(op)):
            return do()
        return await serving().hosted.thread.run(do)

    @method(ordered=False)
    @passes_on
    async def take(self, value: Any) -> Any:
        return value

    def carry_out(self, plan: Plan, values: Sequence[Any], op: Reducer, title: str) -> list[Any]:
        found = list(values)
        for step in plan.steps:
            ranks = tuple(plan.rank_of(number) for number in step.inputs)
            found.append(self._do(_job(step, plan), ranks, op, title, [found[number] for number in step.inputs]))
        return [found[number] for number in plan.results]

    def _do(self, job: Job, ranks: tuple[int, ...], op: Reducer, title: str, values: Sequence[Any]) -> Any:
        work, how, part, parts = job
        try:
            inputs = [cut(value, Cut(how), part, parts) for value in values]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{title}: {error}") from None
        try:
            with no_gradients():
                match Work(work):
                    case Work.TAKE:
                        return inputs[0]
                    case Work.CUT:
                        return alone(inputs[0])
                    case Work.LIST:
                        return inputs
                    case Work.JOIN:
                        return joined(inputs[0], inputs[1:], self._allocate)
                    case Work.TOTAL:
                        # It is copied when it is given to others.
                        return reduced(inputs, ranks, op, title, new_memory)
                    case Work.REDUCE:
                        total = reduced(inputs, ranks, op, title, self._allocate)
                        # The rows are the member's result; parts of elements are joined.
                        return total.value if how == Cut.ROWS else total
        except Exception as error:
            add_note(error, f"raised for {title}")
            raise

    @method(ordered=False)
    async def answer(self) -> None: ...


_SPECS: Final = specs_of(Collectives)


# A process; or the target of the steps there: of an actor that is restarted, or in a graph.
Place: TypeAlias = PeerId | Beside
DEATHS: Final = (ActorDied, OwnerDied, PeerLost)


class Members:
    """The members of one collective, by default at the places of the values."""

    def __init__(self, refs: Sequence[Ref[Any]], places: Sequence[Place] | None = None) -> None:
        self._refs = refs
        self._process = state_of(refs[0]).process
        self.places = [place_of(ref) for ref in refs] if places is None else places

    @property
    def nbytes(self) -> int | None:
        if not all(ref.done() for ref in self._refs):
            return None
        return max(_stored_bytes(ref) for ref in self._refs)

    @property
    def one_memory(self) -> bool:
        known = [place.remote if isinstance(place, Target) else place for place in self.places]
        if self._process.options.transport != "shm" or NOWHERE in known:
            return False
        return all(can_share_memory(known[0], place) for place in known)

    def carry_out(self, plan: Plan, op: Reducer, title: str) -> list[Ref[Any]]:
        states = list(map(state_of, self._refs))
        if len(states) > 1 and not any(isinstance(place, AlwaysBeside) for place in self.places):
            self._process.part(Watchdog).expect(title, states)
        values = self.make(plan, op, title)
        return [values[number] for number in plan.results]

    def make(self, plan: Plan, op: Reducer, title: str) -> list[Ref[Any]]:
        caller, values = self._process.part(Caller), list(self._refs)
        sink = state_of(self._refs[0]).sink
        targets = [
            place if isinstance(place, Target) else Target(caller, place, COLLECTIVES, place, sink)
            for place in self.places
        ]
        for step in plan.steps:
            name, args = "take", tuple[Any, ...](values[number] for number in step.inputs)
            if step.work is not Work.TAKE or step.cut is not Cut.WHOLE:
                ranks = map(plan.rank_of, step.inputs)
                paired = chain.from_iterable(zip(ranks, args, strict=True))
                name, args = "step", (*_job(step, plan), op, title, *paired)
            values.append(targets[step.rank].call(_spec(name, title), args, {}))
        return values


@lru_cache
def _spec(name: str, title: str) -> MethodSpec:
    return _SPECS[name].named(title)


def _job(step: Step, plan: Plan) -> Job:
    return int(step.work), int(step.cut), step.part, plan.lengths or plan.parts


def place_of(ref: Ref[Any]) -> Place:
    state = state_of(ref)
    if isinstance(state, CallState) and (state.status is PENDING or _is_captured(state.target)):
        if state.target.actor == NOBODY:
            return TargetBeside(state.target, COLLECTIVES, _producer_of(Ref(state.hold())))
        return place_beside(state.target)
    return state.producer


async def _producer_of(ref: Ref[Any]) -> PeerId:
    await ref.ready()
    return state_of(ref).producer


def cut_up(ref: Ref[Any], count: int) -> list[Ref[Any]]:
    """The items of a list or tuple, each a value of its own in the process that has the list."""
    members = Members([ref], [place_of(ref)] * (count + 1))
    plan = collective.hand_out(count, Cut.ITEM, one_memory=True)
    return members.carry_out(plan, "sum", f"parts({count}) of {state_of(ref).origin}")


def place_beside(target: Target) -> Place:
    host = target.host
    if _is_captured(target):
        return AlwaysBeside(host, COLLECTIVES)
    if isinstance(target, TargetBeside):
        return target if target.remote == NOWHERE else target.remote
    if isinstance(host, FollowingTarget) and host.is_down:
        return TargetBeside(host, COLLECTIVES, host.arrive())
    return host.remote


def _is_captured(target: Target) -> bool:
    return target.caller.outgoing is not target.caller.direct


async def place_of_living(ref: Ref[Any]) -> PeerId | None:
    """The process that has a value, or makes it, if that process lives; None if the value is lost."""
    while True:
        if ref.done() and isinstance(ref.exception(), DEATHS):
            return None
        place = place_of(ref)
        if not isinstance(place, Target) and await _answers(state_of(ref).process.part(Caller), place):
            return place
        if ref.done():
            return None
        # It fails now, or is made elsewhere.
        await ref.ready()


async def _answers(caller: Caller, place: PeerId) -> bool:
    if place == caller.process.id:
        return True
    answer = cast("Collectives", caller.handle(place, COLLECTIVES, place, Collectives)).answer()
    state_of(answer).mark_seen()
    await answer.ready()
    return answer.exception() is None


def _stored_bytes(ref: Ref[Any]) -> int:
    state = state_of(ref)
    return state.stored_bytes if state.stored is None else state.stored.size
