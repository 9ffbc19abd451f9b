"""From operations on whole tensors to local operations and collectives."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_map

from aiodaft.tensor.instructions import ByRank, CollectiveKind, Instruction, Slot, leaves, mapped, slots_of
from aiodaft.tensor.operations import Cause
from aiodaft.tensor.own_rules import by_local_rule, by_own_rule
from aiodaft.tensor.rules import RESHAPES, Move, Placing, Rules, norm_of, strided
from aiodaft.tensor.segments import Collective
from aiodaft.tensor.specs import Meta, Placements, Spec, text
from aiodaft.tensor.views import Aliases, View, is_view, written_arguments

aten = torch.ops.aten


class _Number(float):
    """A number that is known when the plan runs, such as a learning rate; to a rule it is any number."""

    def __new__(cls, slot: Slot) -> _Number:
        return super().__new__(cls, 1.0)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


def gives_number(op: OpOverload[..., Any]) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) in ("number", "float", "int", "bool", "Scalar")


def _without_numbers(args: Any) -> Any:
    return mapped(lambda one: one.slot if isinstance(one, _Number) else one, args)


class Lowering:
    """Turns operations on placed tensors into instructions.

    Attributes:
        specs: Whole shape, dtype and placements of each tensor, by its number.
        written: Whether the strategy asks for what is being lowered.
        whole: The causes of operations that were done whole, since no rule places them.
    """

    def __init__(self, rules: Rules, numbers: Iterator[int] | None = None) -> None:
        self.rules = rules
        self.axes = rules.axes
        self.names = tuple(rules.axes)
        self.replicas: Placements = tuple(Replicate() for _ in self.names)
        self.specs: dict[int, Spec] = {}
        self.instructions: list[Instruction] = []
        self.causes: list[Cause] = []
        self.collectives: list[Collective] = []
        self.cause = Cause("")
        self.written = False
        self.whole: list[Cause] = []
        self.aliases = Aliases()
        self.placed: dict[tuple[int, Placements], int] = {}
        self._copies: dict[int, list[tuple[int, Placements]]] = {}
        """The entries of `placed` by both of their tensors."""
        self.draws: dict[int, Instruction] = {}
        """Those of random numbers, by the tensor that nobody has written."""
        self._numbers = numbers or count()

    def new(self, spec: Spec | None) -> int:
        number = next(self._numbers)
        if spec is not None:
            self.specs[number] = spec
        return number

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.causes.append(self.cause)

    def now(self, number: int) -> int:
        """The number that holds the value of a tensor: another one after a write that took other placements."""
        if number in self.aliases.stale:
            view = self.aliases.views[number]
            is_whole = self.spec(view.base).placements == self.replicas
            again = (self.apply_whole if is_whole else self.apply)(view.op, view.args, view.kwargs)
            self.aliases.made_again(number, leaves(again)[view.place].number)
        return self.aliases.now.get(number, number)

    def spec(self, number: int) -> Spec:
        return self.specs[self.now(number)]

    def redistribute(self, number: int, target: Placements) -> int:
        """The same tensor with other placements; it is made once for each."""
        number = self.now(number)
        spec = self.specs[number]
        if spec.placements == target:
            return number
        known = self.placed.get((number, target))
        if known is not None:
            return known
        if number in self.draws and all(type(one) in (Shard, Replicate) for one in target):
            out = self._draw(self.draws[number], spec.at(target))
        elif any(strided(one) for one in (*spec.placements, *target)) and self.replicas not in (
            spec.placements,
            target,
        ):
            out = self.redistribute(self.redistribute(number, self.replicas), target)
        else:
            out = number
            for move in self.rules.route(spec, target):
                out = self._move(out, move)
        self.placed[number, target] = out
        for one in (number, out):
            self._copies.setdefault(one, []).append((number, target))
        return out

    def apply(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Lowers an operation; returns its results, with `Slot`s for tensors, in their structure.

        An operation that writes to a tensor returns the slot that it was given. A slot without a spec is a number.
        """
        args, kwargs = mapped(self._with_numbers, (tuple(args), dict(kwargs)))
        if gives_number(op):
            return self._apply_number(op, args, kwargs)
        if not slots_of((args, kwargs)):
            is_draw = name_of(op) == "aiodaft.random.default"
            meta = _meta_of_draw(*args) if is_draw else _metas(op, args, kwargs)
            made = self._emit_op(op, args, kwargs, self._as_replicas(meta))
            if is_draw:
                self.draws[made.number] = self.instructions[-1]
            return made
        if (result := by_local_rule(self, op, args)) is not NotImplemented:
            return result
        if (result := by_own_rule(self, op, args, kwargs)) is not NotImplemented:
            self._note_views(op, args, kwargs, result, attached=False)
            return result
        placing = self.rules.place(op, *mapped(self._spec, (args, kwargs)))
        return self._apply_placed(op, placing or self._whole(op, args, kwargs), args, kwargs)

    def _draw(self, whole: Instruction, spec: Spec) -> int:
        ranks = range(self.rules.size)
        offset = ByRank(tuple(list(self.rules.offset(spec, rank)) for rank in ranks))
        local = ByRank(tuple(map(list, self.rules.local_shapes(spec))))
        out = self.new(spec)
        self.emit(whole._replace(kwargs={**whole.kwargs, "offset": offset, "local": local}, outs=(out,)))
        return out

    def _apply_number(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        args = mapped(
            lambda one: Slot(self.redistribute(one.number, self.replicas)) if isinstance(one, Slot) else one, args
        )
        out = self.new(None)
        self.emit(Instruction("op", name_of(op), _without_numbers(args), _without_numbers(dict(kwargs)), (out,)))
        return Slot(out)

    def apply_whole(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._apply_placed(op, self._whole(op, args, kwargs), args, kwargs)

    def _whole(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placing:
        numbers = slots_of((args, kwargs))
        if any(self.spec(number).placements != self.replicas for number in numbers):
            self.whole.append(self.cause)
        specs = mapped(self._spec, (args, kwargs))
        metas = _metas(op, *mapped(lambda one: one.meta if isinstance(one, Spec) else one, specs))
        return Placing(op, tuple(self.replicas for _ in numbers), specs[0], self._as_replicas(metas))

    def _apply_placed(
        self, op: OpOverload[..., Any], placing: Placing, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        numbers = slots_of((args, kwargs))
        written = dict.fromkeys(written_arguments(op, args, kwargs))
        wanted = dict(zip(numbers, placing.inputs, strict=True))
        if any(not self._may_write(number, wanted[number]) for number in written):
            self._gather_roots(written)
            placing = self._whole(op, args, kwargs)
        moved = [self.redistribute(number, want) for number, want in zip(numbers, placing.inputs, strict=True)]
        for number in written:
            held = moved[numbers.index(number)]
            writable = self._writable(number, held)
            moved = [writable if one == held else one for one in moved]
        here = iter(moved)
        local, named = mapped(
            lambda one: Slot(next(here)) if isinstance(one, Spec | Slot) else one, (placing.args, dict(kwargs))
        )
        attached = moved[0] == self.now(numbers[0])
        result = self._emit_op(placing.target, local, named, placing.outputs, written=bool(written))
        for number in written:
            self.draws.pop(self.now(self.aliases.root(number)), None)
            self._forget_copies(self.aliases.write(number))
        self._note_views(op, args, kwargs, result, attached=attached)
        return Slot(next(iter(written))) if result is None and op._schema.returns else result

    def _note_views(self, op: OpOverload[..., Any], args: Any, kwargs: Any, result: Any, *, attached: bool) -> None:
        if is_view(op):
            for place, one in enumerate(leaves(result)):
                self.aliases.add(one.number, View(slots_of(args)[0], op, args, kwargs, place, attached))

    # Writes

    def _may_write(self, number: int, want: Placements) -> bool:
        """Whether a write to its local tensor, placed like this, reaches the tensors that share its memory."""
        if number not in self.aliases.views:
            return True
        is_alone = self.now(self.aliases.root(number)) not in self.aliases.shared
        return is_alone and self.aliases.is_attached(number) and self.spec(number).placements == want

    def _gather_roots(self, numbers: Iterable[int]) -> None:
        for root in dict.fromkeys(map(self.aliases.root, numbers)):
            self._hold(root, self._writable(root, self.redistribute(root, self.replicas)))

    def _writable(self, number: int, held: int) -> int:
        """`held` is the tensor from now on, or a copy if another tensor may have the same memory."""
        if number in self.aliases.views:
            return held
        if held in self.aliases.shared:
            copy = self.new(self.specs[held])
            self.emit(Instruction("op", "aten.clone.default", (Slot(held),), {}, (copy,)))
            held = copy
        if held != self.now(number):
            self._hold(number, held)
        return held

    def _hold(self, number: int, held: int) -> None:
        """The value of a tensor that is no view is there from now on, and its views are made again."""
        family = list(self.aliases.family(number))
        self._forget_copies(family)
        self.aliases.now[number] = held
        self.aliases.stale.update(family[1:])

    def _forget_copies(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for one in (number, self.aliases.now.get(number, number)):
                for key in self._copies.pop(one, ()):
                    self.placed.pop(key, None)

    def _emit_op(
        self,
        op: OpOverload[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Any,
        *,
        written: bool = False,
    ) -> Any:
        args, kwargs = _without_numbers((args, dict(kwargs)))
        if written and len(op._schema.returns) <= 1:
            self.emit(Instruction("op", name_of(op), args, kwargs, (None,) * len(op._schema.returns)))
            return None
        result = mapped(lambda one: Slot(self.new(one)) if isinstance(one, Spec) else None, outputs)
        numbers = [one.number if one is not None else None for one in _results(result)]
        self.emit(Instruction("op", name_of(op), args, kwargs, tuple(numbers)))
        return mapped(lambda one: self._without_norms(one) if isinstance(one, Slot) else one, result)

    def _without_norms(self, slot: Slot) -> Slot:
        spec = self.specs[slot.number]
        number = slot.number
        for axis, placement in enumerate(spec.placements):
            if (norm := norm_of(placement)) is not None:
                number = self._collective(number, axis, Replicate(), "all_reduce", f"norm:{norm}")
        return Slot(number)

    def _move(self, number: int, move: Move) -> int:
        source, target = move.source, move.target
        axis = move.axis
        if self.axes[self.names[axis]] == 1:
            return self._local(number, axis, target, "alias")
        if (cut := strided(source)) is not None and target.is_replicate():
            return self._collective(number, axis, target, "all_gather", *cut)
        if (cut := strided(target)) is not None and source.is_replicate():
            return self._local(number, axis, target, "chunk", *cut)
        match source, target:
            case Partial(reduce_op=operation), Replicate():
                return self._collective(number, axis, target, "all_reduce", operation)
            case Partial(reduce_op=operation), Shard(dim=dim):
                return self._collective(number, axis, target, "reduce_scatter", dim, operation)
            case Shard(dim=dim), Replicate():
                return self._collective(number, axis, target, "all_gather", dim)
            case Shard(dim=dim), Shard(dim=other):
                return self._collective(number, axis, target, "all_to_all", dim, other)
            case Replicate(), Shard(dim=dim):
                return self._local(number, axis, target, "chunk", dim)
            case Replicate(), Partial(reduce_op=operation):
                return self._local(number, axis, target, "partition", operation)
        raise NotImplementedError(
            f"{self.cause.line}: a tensor of {self.cause.operation} cannot go from {text(source)} to {text(target)} on "
            f"the axis {self.names[axis]}: `.redistribute` it to replicas before"
        )

    def _local(self, number: int, axis: int, placement: Any, kind: Any, *args: Any) -> int:
        out = self._after(number, axis, placement)
        self.emit(Instruction(kind, self.names[axis], (Slot(number), *args), {}, (out,)))
        self.aliases.shared |= {number, out}
        return out

    def _collective(self, number: int, axis: int, placement: Any, kind: CollectiveKind, *args: Any) -> int:
        out = self._after(number, axis, placement)
        name = self.names[axis]
        whole = self.specs[number].at(self._placed_on(number, axis, Replicate()))
        sizes = (self.rules.local_bytes(one) for one in (self.specs[number], self.specs[out], whole))
        received = tuple(
            received_bytes(kind, self.axes[name], before, after, most)
            for before, after, most in zip(*sizes, strict=True)
        )
        self.collectives.append(Collective(kind, name, received, self.cause, self.written, out))
        self.emit(Instruction(kind, name, (Slot(number), *args), {}, (out,)))
        return out

    def _after(self, number: int, axis: int, placement: Any) -> int:
        return self.new(self.specs[number].at(self._placed_on(number, axis, placement)))

    def _placed_on(self, number: int, axis: int, placement: Any) -> Placements:
        placements = self.specs[number].placements
        return (*placements[:axis], placement, *placements[axis + 1 :])

    def _with_numbers(self, one: Any) -> Any:
        return _Number(one) if isinstance(one, Slot) and one.number not in self.specs else one

    def _spec(self, one: Any) -> Any:
        return self.spec(one.number) if isinstance(one, Slot) else one

    def _as_replicas(self, metas: Any) -> Any:
        return mapped(lambda one: Spec(self.replicas, one) if isinstance(one, Meta) else one, metas)


def name_of(op: OpOverload[..., Any]) -> str:
    return f"{op.namespace}.{op._schema.name.split('::')[1]}.{op._overloadname}"


def received_bytes(kind: CollectiveKind, members: int, before: int, after: int, whole: int) -> int:
    match kind:
        case "all_reduce":
            return 2 * before * (members - 1) // members
        case "reduce_scatter":
            return after * (members - 1)
        case "all_gather":
            return after - before
        case "all_to_all":
            return after - before * after // max(whole, 1)


def _meta_of_draw(kind: str, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Meta:
    # Fake tensors take an operation without tensors for one that has a device.
    return Meta.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _metas(op: OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
    def fake(one: Any) -> Any:
        return torch.empty_strided(one.shape, one.stride, dtype=one.dtype) if isinstance(one, Meta) else one

    with FakeTensorMode():
        result = RESHAPES.get(op, op)(*tree_map(fake, args), **tree_map(fake, dict(kwargs)))
    return tree_map(lambda one: Meta.of(one) if isinstance(one, torch.Tensor) else None, result)


def _results(result: Any) -> Sequence[Any]:
    if result is None:
        return ()
    return result if isinstance(result, list | tuple) else (result,)


@contextmanager
def quiet() -> Generator[None]:
    """Torch logs each error of a shape besides raising it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
