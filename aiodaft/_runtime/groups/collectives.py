"""Collectives on refs: values are cut, reduced and joined, by calls between the processes of the members.

Every process has a `Collectives` actor. A step of a plan is a call of it, with refs of the step's inputs: values go
from member to member as arguments do, and errors, deaths and cancellations are those of calls.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from itertools import chain
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.groups import collective
from aiodaft._protocol.groups.collective import QUICK, Cut, Parts, Plan, Step, Work, runs_on_loop
from aiodaft._protocol.ids import COLLECTIVES, NOBODY, PeerId, can_share_memory
from aiodaft._protocol.objects.value import PENDING
from aiodaft._runtime.actors.hosted_actor import serving
from aiodaft._runtime.calls.call import Caller, CallState, Target
from aiodaft._runtime.calls.following import AlwaysBeside, Beside, FollowingTarget, TargetBeside
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.serialization.encoded import loaded_torch
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, OwnerDied, PeerLost
from aiodaft.methods import MethodSpec, method, passes_on, specs_of
from aiodaft.ref import Ref

Allocate: TypeAlias = Callable[[Any, Any], Any]
# Elements that torch computes in the calling thread: its GRAIN_SIZE.
SERIAL: Final = 1 << 15
# Ops that numpy computes as fast as torch, and to the same bits; of two NaNs, it may give the other one.
_SAME_OPS: Final = frozenset({"sum", "product"})
_SAME_DTYPES: Final = frozenset({"torch.float32", "torch.float64", "torch.int32", "torch.int64"})
# The name of a reducer below, a function of two values, or an `OfAll`.
Reducer: TypeAlias = str | Callable[..., Any]


T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class OfAll(Generic[T, R_co]):
    """An op of the values of all members together, such as a median: `all_reduce(gradients, OfAll(median))`.

    Attributes:
        function: Takes the list of the values, in the order of ranks, and must not change them. It runs in members'
            processes, on whole values; in `reduce_scatter` on parts.
    """

    function: Callable[[list[T]], R_co]

    def __call__(self, values: list[T]) -> R_co:
        return self.function(values)


@dataclass(frozen=True)
class Piece:
    """A part of a value, and the kind of the whole; see `kind_of`."""

    kind: str
    value: Any


_REDUCERS: Final[dict[str, tuple[Callable[[Any, Any], Any], str, str]]] = {
    "sum": (operator.add, "add", "add"),
    "product": (operator.mul, "mul", "multiply"),
    "min": (min, "minimum", "minimum"),
    "max": (max, "maximum", "maximum"),
}


def check_reducer(op: Reducer) -> Reducer:
    if not callable(op) and op not in _REDUCERS:
        raise ValueError(f"op is one of {', '.join(_REDUCERS)}, or a function of two values, not {op!r}")
    if isinstance(op, OfAll) and not callable(op.function):
        raise TypeError(f"{op!r:.80}: a function of the list of all values is needed")
    return op


def combine_into(total: Any, values: Sequence[Any], op: str) -> None:
    """Combine dense CPU tensors of one size from the left, into memory of none of them. It uses no threads of torch."""
    function = _function(op)
    if len(values) == 1:
        total.copy_(values[0])
        return
    parts: Iterable[Sequence[Any]] = [(total, *values)]
    if total.numel() > SERIAL:
        parts = zip(*(value.split(SERIAL) for value in (total, *values)), strict=True)
    _from_the_left(function, parts)


def combined(values: Sequence[Any], op: str, out: Any) -> Any:
    first, *others = values
    if not others:
        return first.clone() if out is None else out.copy_(first)
    function = _function(op)
    for other in others:
        first = out = function(first, other, out=out)
    return out


@cache
def _function(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(loaded_torch(), _REDUCERS[op][1])
    return function


def kind_of(value: Any) -> str:
    """All members have to share the type, and of tensors and arrays the dtype and the shape."""
    if isinstance(value, Piece):
        return value.kind
    if not _is_array(value):
        return type(value).__name__
    dtype, shape = str(value.dtype), tuple(value.shape)
    if not _is_tensor(value):
        return f"numpy {dtype} {shape}"
    return f"{dtype} {shape}" if _is_dense(value) else f"{dtype} {shape} {value.layout}"


def cut(value: Any, how: Cut, part: int, parts: Parts) -> Any:
    if how is Cut.WHOLE or isinstance(value, Piece):
        return value
    if how is Cut.ITEM:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list or tuple of {parts} items, not {type(value).__name__}")
        if len(value) != parts:
            raise ValueError(f"expected a list or tuple of {parts} items, not of {len(value)}")
        return value[part]
    if not _is_array(value):
        if how is Cut.ROWS:
            raise TypeError(f"expected a tensor or an array to be cut, not {type(value).__name__}")
        return Piece(kind_of(value), value)
    if how is Cut.ROWS and not value.shape:
        raise ValueError(f"{kind_of(value)} has no first dimension to be cut")
    rows = value if how is Cut.ROWS else value.reshape(-1)
    start, stop = _bounds(rows.shape[0], part, parts)
    return Piece(kind_of(value), rows[start:stop])


def alone(value: Any) -> Any:
    if isinstance(value, Piece):
        return Piece(value.kind, alone(value.value))
    if not _is_array(value):
        return value
    return value.clone() if _is_tensor(value) else value.copy()


def reduced(values: Sequence[Any], ranks: Sequence[int], op: Reducer, title: str, allocate: Allocate) -> Any:
    """Combine values from the left. Pieces give a piece.

    Raises:
        ValueError: The values are not of one kind.
    """
    first, kind = values[0], kind_of(values[0])
    for value, rank in zip(values[1:], ranks[1:], strict=True):
        if kind_of(value) != kind:
            raise ValueError(
                f"{title}: the members disagree: rank {ranks[0]} has {kind}, rank {rank} has {kind_of(value)}"
            )
    if isinstance(first, Piece):
        return Piece(kind, _combined([piece.value for piece in values], op, allocate))
    return _combined(values, op, allocate)


def joined(pattern: Any, parts: Sequence[Piece], allocate: Allocate) -> Any:
    if not _is_array(pattern):
        return parts[0].value
    pieces = [part.value for part in parts]
    whole = _like(pattern, allocate)
    flat, start = whole.reshape(-1), 0
    for piece in pieces:
        flat[start : start + len(piece)] = piece
        start += len(piece)
    return whole


def new_memory(shape: Any, dtype: Any) -> Any:
    torch: Any = loaded_torch()
    return torch.empty(shape, dtype=dtype)


def no_gradients() -> AbstractContextManager[object]:
    torch = loaded_torch()
    return nullcontext() if torch is None else torch.no_grad()


def nbytes_of(value: Any) -> int:
    if isinstance(value, Piece):
        return nbytes_of(value.value)
    if _is_tensor(value):
        # A sparse one has no `nbytes`.
        return int(value.numel() * value.element_size())
    return int(value.nbytes) if _is_array(value) else 0


def bytes_in(value: Any) -> int:
    return sum(map(nbytes_of, value)) if isinstance(value, list) else nbytes_of(value)


def written(out: Any, value: Any) -> Any:
    """Write a result, or each of a list, into memory of the member; returns that.

    Raises:
        ValueError: They are not of one kind.
    """
    if isinstance(value, list) and type(out) in {list, tuple} and len(out) == len(value):
        for one, result in zip(out, value, strict=True):
            written(one, result)
    elif value is not None:
        if not _is_array(out) or kind_of(out) != kind_of(value):
            kind = f"a list of {len(value)}" if isinstance(value, list) else kind_of(value)
            raise ValueError(f"out has to be of the kind of the result: it is {kind_of(out)}, the result is {kind}")
        with no_gradients():
            out[...] = value
    return out


def _combined(values: Sequence[Any], op: Reducer, allocate: Allocate) -> Any:
    if isinstance(op, OfAll):
        return op(list(values))
    if callable(op):
        return reduce(op, values)
    number, *_ = _REDUCERS[op]
    first = values[0]
    if not _has_reducers(first, op):
        raise TypeError(
            f"{op!r} is for numbers, dense tensors and arrays of numbers, not for {kind_of(first)}: "
            "give a function of two values"
        )
    if not _is_array(first):
        return reduce(number, values)
    total = _like(first, allocate)
    if len(values) == 1:
        total[...] = first
        return total
    _from_the_left(*_computing(op, [total, *values]))
    return total


def _from_the_left(function: Callable[..., Any], parts: Iterable[Sequence[Any]]) -> None:
    """The first of each part is the memory for the result."""
    for out, one, two, *others in parts:
        function(one, two, out=out)
        for other in others:
            function(out, other, out=out)


def _computing(op: str, values: Sequence[Any]) -> tuple[Callable[..., Any], Iterable[Sequence[Any]]]:
    """The function that reduces values of one shape, and the parts of them that it is called with.

    Quick work is done without the threads of torch, which spin for milliseconds at the end of each job where others
    need the cores. numpy has none; torch uses none for small parts, which take longer.
    """
    _, of_torch, of_numpy = _REDUCERS[op]
    first = values[0]
    if not _is_tensor(first):
        return getattr(_numpy(), of_numpy), [values]
    function = getattr(loaded_torch(), of_torch)
    if first.numel() <= SERIAL or len(values) * first.nbytes > 2 * QUICK:
        return function, [values]
    if first.device.type != "cpu" or not all(value.is_contiguous() for value in values):
        return function, [values]
    if op in _SAME_OPS and str(first.dtype) in _SAME_DTYPES and _numpy_sees_tensors():
        return _quiet(of_numpy), [[value.detach().numpy() for value in values]]
    return function, zip(*(value.view(-1).split(SERIAL) for value in values), strict=True)


def _like(value: Any, allocate: Allocate) -> Any:
    if not _is_tensor(value):
        return _numpy().empty(value.shape, value.dtype)
    if value.device.type != "cpu":
        return value.new_empty(value.shape)
    return allocate(value.shape, value.dtype)


def _bounds(length: int, part: int, parts: Parts) -> tuple[int, int]:
    if isinstance(parts, tuple):
        if sum(parts) != length:
            raise ValueError(f"the lengths {list(parts)} are not those of parts of {length} rows")
        return sum(parts[:part]), sum(parts[: part + 1])
    size, longer = divmod(length, parts)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def _is_tensor(value: Any) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return _is_tensor(value) or (type(value).__module__ == "numpy" and not isinstance(value, _numpy().generic))


def _has_reducers(value: Any, op: str) -> bool:
    """Whether an op has a meaning for a value, and for parts of it. For lists and texts, `+` makes longer ones."""
    if _is_tensor(value):
        return _is_dense(value)
    return op != "sum" or not (isinstance(value, Sequence) or (_is_array(value) and value.dtype.kind in "SU"))


def _is_dense(value: Any) -> bool:
    return str(value.layout) == "torch.strided"


@cache
def _numpy_sees_tensors() -> bool:
    torch: Any = loaded_torch()
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


@cache
def _quiet(name: str) -> Callable[..., Any]:
    quiet: Callable[..., Any] = _numpy().errstate(all="ignore")(getattr(_numpy(), name))
    return quiet


def _numpy() -> Any:
    return sys.modules["numpy"]


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
