"""Operations that write, and views: the traits of an operation, and writes through views without writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from aiodaft.tensor.instructions import Slot, slots_of
from aiodaft.tensor.randoms import is_random
from aiodaft.tensor.specs import Meta

aten = torch.ops.aten
Op: TypeAlias = OpOverload[..., Any]


class Step(NamedTuple):
    """A view: `target(parent, *args, **kwargs)`, or one of its results."""

    target: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: int | None
    parent: Meta


class Traits(NamedTuple):
    written: tuple[int | str, ...]
    viewed: int | None
    random: bool


@cache
def traits_of(func: Op) -> Traits:
    arguments = func._schema.arguments
    aliased = [(at, one, one.alias_info) for at, one in enumerate(arguments) if one.alias_info is not None]
    written = tuple(one.name if one.kwarg_only else at for at, one, alias in aliased if alias.is_write)
    returned = any(one.alias_info is not None for one in func._schema.returns)
    return Traits(written, aliased[0][0] if aliased and returned and not written else None, is_random(func))


def source_of(target: Op, args: Any, kwargs: Any) -> int | None:
    traits = traits_of(target)
    if traits.viewed is None and not traits.written:
        return args[0].number if target is aten._unsafe_view.default else None
    if traits.viewed is not None:
        return int(args[traits.viewed].number)
    where = traits.written[0]
    return int((args[where] if isinstance(where, int) else kwargs[where]).number)


@cache
def functional_of(func: Op) -> Op | None:
    packet = getattr(aten, func._opname.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments if one.name != "out"]
    for name in packet.overloads():
        one = getattr(packet, name)
        if not traits_of(one).written and [(x.name, str(x.type)) for x in one._schema.arguments] == wanted:
            return one  # type: ignore[no-any-return]  # torch says Any
    return None


def written_through(
    step: Step, metas: Mapping[int, Meta], parent: int, child: int
) -> tuple[Op, tuple[Any, ...]] | None:
    """The operation that gives the parent of a view its value after a write to the view; None if it is not known."""
    undo = _UNDO.get(step.target._opname)
    return None if undo is None else undo(metas, step, parent, child)


def _reshaped(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
    return aten.reshape.default, (Slot(child), list(step.parent.shape))


def _scattered(name: str) -> Callable[..., tuple[Op, tuple[Any, ...]]]:
    target = getattr(aten, name).default

    def undo(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
        return target, (Slot(parent), Slot(child), *step.args)

    return undo


def _swapped(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
    return step.target, (Slot(child), *step.args)


def _permuted(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
    rank = len(step.parent.shape)
    order = [dim % rank for dim in step.args[0]]
    return aten.permute.default, (Slot(child), [order.index(dim) for dim in range(rank)])


def _unbound(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
    dim = step.args[0] if step.args else 0
    return aten.select_scatter.default, (Slot(parent), Slot(child), dim, step.at)


def _unsplit(metas: Mapping[int, Meta], step: Step, parent: int, child: int) -> tuple[Op, tuple[Any, ...]]:
    sizes, dim = step.args[0], step.args[1] if len(step.args) > 1 else 0
    index = step.at or 0
    start = sum(sizes[:index]) if isinstance(sizes, list) else sizes * index
    length = metas[child].shape[dim]
    return aten.slice_scatter.default, (Slot(parent), Slot(child), dim, start, start + length)


_UNDO: dict[str, Callable[..., tuple[Op, tuple[Any, ...]]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"), _reshaped),
    **dict.fromkeys(("transpose", "t"), _swapped),
    "permute": _permuted,
    "select": _scattered("select_scatter"),
    "slice": _scattered("slice_scatter"),
    "diagonal": _scattered("diagonal_scatter"),
    "as_strided": _scattered("as_strided_scatter"),
    "unbind": _unbound,
    "split": _unsplit,
    "split_with_sizes": _unsplit,
}

_WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Written in training, though the schema does not say it."""


class View(NamedTuple):
    """The operation that made a view.

    Attributes:
        place: Which of the results of the operation, such as a split.
        attached: Whether the local tensor shares the memory of the local base: no redistribution came between.
    """

    base: int
    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int
    attached: bool


@dataclass
class Aliases:
    """Tensors by number.

    Attributes:
        now: The number that holds the value of a tensor, where that is another one since a write.
        views: How a tensor was made that is a view.
        stale: Views whose base was written, and that do not share its memory: made again when they are used.
        shared: Tensors that may share memory with another one that is no view of the program: parts cut from replicas.
    """

    now: dict[int, int] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    _children: dict[int, list[int]] = field(default_factory=dict)

    def add(self, number: int, view: View) -> None:
        self.views[number] = view
        self._children.setdefault(view.base, []).append(number)

    def root(self, number: int) -> int:
        while (view := self.views.get(number)) is not None:
            number = view.base
        return number

    def is_attached(self, number: int) -> bool:
        while (view := self.views.get(number)) is not None:
            if not view.attached or number in self.stale:
                return False
            number = view.base
        return True

    def family(self, number: int) -> Iterator[int]:
        yield number
        for child in self._children.get(number, ()):
            yield from self.family(child)

    def made_again(self, number: int, held: int) -> None:
        view = self.views.get(held)
        self.views[number] = self.views[number]._replace(attached=view is not None and view.attached)
        self.stale.discard(number)
        self.now[number] = held
        self.forget(held)

    def write(self, number: int) -> list[int]:
        """Was written; returns the tensors that changed with it. Views without its memory become stale."""
        changed = list(self.family(self.root(number)))
        self.stale |= {one for one in changed if not self.is_attached(one) and one != number}
        return changed

    def forget(self, number: int) -> None:
        if not self._children.get(number):
            view = self.views.pop(number, None)
            if view is not None:
                self._children[view.base].remove(number)
            self.now.pop(number, None)
            self.stale.discard(number)


@cache
def is_view(op: Op) -> bool:
    """Whether its results share the memory of its first argument, which it does not write."""
    returned = op._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


@cache
def _written_names(op: Op) -> tuple[str, ...]:
    written = [one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return (*written, *_WRITES.get(op, ()))


def written_arguments(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    names = _written_names(op)
    if not names:
        return []
    given = {**dict(zip([one.name for one in op._schema.arguments], args, strict=False)), **kwargs}
    if op in _WRITES and not given.get("training"):
        return []
    return slots_of([given.get(name) for name in names])
