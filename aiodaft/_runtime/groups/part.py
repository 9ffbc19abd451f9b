"""The part of one member in a keyed collective, and its message to the one where they meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

from aiodaft._protocol.groups.collective import meets_with_values, plan_of, results_of, star, values_of
from aiodaft._protocol.groups.meeting import Coming
from aiodaft._protocol.groups.roster import Roster, Steps
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.actors.host import Standing
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.arithmetic import OfAll, Reducer, kind_of, nbytes_of
from aiodaft._runtime.groups.collectives import Collectives, Members
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.small import encode_small
from aiodaft.exceptions import DaftError
from aiodaft.ref import Ref


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one member in a collective.

    Attributes:
        root: The rank that alone has a value or gets a result, if that is so.
        timeout: Seconds that the others may be late.
        lengths: Of `reduce_scatter`: the rows of each member. None: equal parts.
        finish: Makes the result of the value that comes. It may take long.
    """

    operation: str
    key: Hashable
    roster: Roster[Any]
    steps: Steps
    rank: int
    standing: Standing
    op: Reducer = "sum"
    root: int = 0
    timeout: float | None = None
    lengths: tuple[int, ...] | None = None
    finish: Callable[[Any], Any] | None = None

    @property
    def label(self) -> str:
        return self.operation if self.key is None else f"{self.operation} {self.key!r}"

    @property
    def title(self) -> str:
        return f"{self.label} of {self.roster.id}"

    @property
    def reduces(self) -> bool:
        return self.operation in {"all_reduce", "reduce", "reduce_scatter"}

    @property
    def has_value(self) -> bool:
        return self.operation != "barrier" and self.rank in values_of(self.operation, self.roster.size, self.root)

    def terms(self, value: Any) -> dict[str, Hashable]:
        terms: dict[str, Hashable] = {"operation": self.operation, "root": self.root}
        if self.reduces:
            op = self.op
            terms["op"] = _name_of(op) if callable(op) else op
            terms["value"] = kind_of(value)
        if self.lengths is not None:
            terms["lengths"] = self.lengths
        return terms

    @property
    def meets_at(self) -> int:
        """The rank where members meet: keys spread the work."""
        return crc32(repr(self.key).encode()) % self.roster.size


@dataclass(frozen=True)
class Joining:
    """The message of a member to the one where they meet; fields as in `Part`."""

    at: int
    group: str
    epoch: int
    steps: Steps
    size: int
    coming: Coming
    timeout: float | None
    nbytes: int | None


# The form in which a value travels to the meeting and back: a small one encoded, one that is reduced there as the only
# item of a list, of others the ref. A result may come in a tuple, with refs of the values that the member makes of its
# own one for others.
Packed: TypeAlias = bytes | list[Any] | Opaque | tuple[Any, ...] | None


class Brought(NamedTuple):
    process: PeerId
    nbytes: int | None
    value: Packed


@dataclass(eq=False, slots=True)
class Joined:
    at: tuple[PeerId, Joining] | None = None
    void: bool = False


@dataclass(eq=False, slots=True)
class Taking:
    """A call of `Keyed.take_part`. `withdrawn`: the member has not come; `left`: it waits no longer, while its call
    goes on.
    """

    part: Part
    # The call of the member that has begun it, and the scope inside which it meets others; as in `Coming`.
    call: InboundCall | None
    within: Hashable
    number: int
    outcome: Any = None
    # Set when the member where the others meet was told, or is not to be told; and that of the collective before.
    told: asyncio.Event = field(default_factory=asyncio.Event)
    before: asyncio.Event | None = None
    has_begun: bool = False
    joined: Joined = field(default_factory=Joined)
    # Why it was withdrawn: the member has not come.
    withdrawn: DaftError | None = None
    # The others get this: the member waits no longer, while its call goes on.
    left: DaftError | None = None

    def now(self, coming: Coming, brought: Packed) -> tuple[Coming, Packed]:
        """Its message: a fault if the member waits no longer. Raises the fault if it has not come at all."""
        if self.left is None:
            return coming, brought
        if self.joined.void:
            raise self.left
        return replace(coming, fault=self.left), None

    async def turn(self) -> None:
        """Wait for the earlier collectives of this member: the order of its calls counts, not that of their values."""
        if self.before is not None:
            await self.before.wait()


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, OfAll):
        function = function.function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


# A collective: its name, its root, and the lengths of parts.
_What: TypeAlias = tuple[str, int, tuple[int, ...] | None]


class MeetingValues:
    """Packs the values of members in this process; for members that meet here, makes their results."""

    def __init__(self, caller: Caller, store: Store, collectives: Collectives) -> None:
        self._caller = caller
        self._store = store
        self._collectives = collectives

    def pack(self, part: Part, value: Any) -> tuple[int | None, Packed]:
        if not part.has_value:
            return None, None
        nbytes = nbytes_of(value) or None
        if not callable(part.op):
            small = encode_small((value,), by_name=False)
            if small is not None:
                return nbytes, small[0]
            if nbytes is not None and meets_with_values(part.operation, part.roster.size, nbytes):
                return nbytes, [value]
        return nbytes, self._kept(value, part.title)

    async def unpack(self, answer: Packed) -> Any:
        match answer:
            case Opaque():
                return await answer.content
            case tuple():
                result, *beside = answer
                for one in beside:
                    # From then on the member may write to its value.
                    await one.content.ready()
                return None if result is None else await result.content
            case None:
                return None
            case _:
                return self._given(answer)

    async def apart(self, value: Any, title: str) -> Any:
        state = self._caller.objects.refs.put(value, title)
        assert state.stored is not None
        state.stored.origins = []
        received = await self._caller.objects.transfer.take_own(state.stored)
        return await self._store.decode(received, refs=received.refs)

    def conclude(self, coming: Coming, size: int, op: Reducer, brought: Sequence[Brought]) -> list[Packed]:
        operation, root = cast("str", coming.terms["operation"]), cast("int", coming.terms["root"])
        lengths = cast("tuple[int, ...] | None", coming.terms.get("lengths"))
        answers: list[Packed] = [None] * size
        if operation == "barrier":
            return answers
        given = [brought[rank] for rank in values_of(operation, size, root)]
        here = not callable(op) and all(isinstance(one.value, bytes | list) for one in given)
        work, places = (operation, root, lengths), [one.process for one in brought]
        if not here:
            return self._carry_out(work, op, coming.title, given, places)
        results = self._compute(work, op, coming.title, given, places)
        for rank, result in zip(results_of(operation, size, root), results, strict=True):
            answers[rank] = result
        return answers

    def _compute(
        self, what: _What, op: Reducer, title: str, given: Sequence[Brought], places: Sequence[PeerId]
    ) -> list[Packed]:
        (operation, root, lengths), size = what, len(places)
        plan = plan_of(operation, size, root, 0, lengths, one_memory=True, elementwise=True)
        if operation == "all_reduce":
            plan = star(size)
        values = [self._given(cast("bytes | list[Any]", one.value)) for one in given]
        results = self._collectives.carry_out(plan, values, op, title)
        encoded: dict[int, Packed] = {}
        for result in results:
            if id(result) not in encoded:
                small = encode_small((result,), by_name=False)
                if small is not None:
                    encoded[id(result)] = small[0]
                elif meets_with_values(operation, size, nbytes_of(result)):
                    encoded[id(result)] = [result]
                else:
                    encoded[id(result)] = self._kept(result, title)
        return [encoded[id(result)] for result in results]

    def _carry_out(
        self, what: _What, op: Reducer, title: str, given: Sequence[Brought], places: Sequence[PeerId]
    ) -> list[Packed]:
        (operation, root, lengths), size = what, len(places)
        refs = [
            one.value.content if isinstance(one.value, Opaque) else
            self._kept(self._given(cast("bytes | list[Any]", one.value)), title).content
            for one in given
        ]  # fmt: skip
        # In these plans the root comes first, and then all members.
        members = Members(refs, [places[root], *places] if len(given) < size else places)
        sizes = [one.nbytes for one in given if one.nbytes is not None]
        nbytes = max(sizes) if len(sizes) == len(given) else None
        as_far = {"one_memory": members.one_memory, "elementwise": not callable(op)}
        plan = plan_of(operation, size, root, nbytes, lengths, **as_far)
        made, results = (
            members.make(plan, op, title),
            dict(zip(results_of(operation, size, root), plan.results, strict=True)),
        )
        answers = list[Packed]()
        for rank in range(size):
            own = rank if len(given) == size else 0 if rank == root else None
            beside = [] if own is None else plan.beside(own, results.get(rank))
            for number in (*beside, *plan.results):
                # Members get the errors; one that is gone, or does not wait any more, does not.
                state_of(made[number]).mark_seen()
            result = Opaque(made[results[rank]]) if rank in results else None
            answers.append((result, *(Opaque(made[number]) for number in beside)))
        return answers

    def _kept(self, value: Any, title: str) -> Opaque:
        return Opaque(Ref(self._caller.objects.refs.put(value, title)))

    def _given(self, packed: bytes | list[Any]) -> Any:
        return packed[0] if isinstance(packed, list) else self._decoded(packed)

    def _decoded(self, payload: bytes) -> Any:
        return self._store.decode_now(ReceivedValue(payload, None, [], []))
