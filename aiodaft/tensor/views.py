"""Operations that write, and views: the traits of an operation, and writes through views without writing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.randoms import is_random
from aiodaft.tensor.specs import Meta

__all__ = ["Op", "Step", "Traits", "functional_of", "source_of", "traits_of", "written_through"]

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


@functools.cache
def traits_of(func: Op) -> Traits:
    """The arguments that an operation writes to, and the one that its results are views of."""
    arguments = func._schema.arguments
    aliased = [(at, one, one.alias_info) for at, one in enumerate(arguments) if one.alias_info is not None]
    written = tuple(one.name if one.kwarg_only else at for at, one, alias in aliased if alias.is_write)
    returned = any(one.alias_info is not None for one in func._schema.returns)
    return Traits(written, aliased[0][0] if aliased and returned and not written else None, is_random(func))


def source_of(target: Op, args: Any, kwargs: Any) -> int | None:
    """The number of the tensor in whose memory the results of an operation are."""
    traits = traits_of(target)
    if traits.viewed is None and not traits.written:
        return args[0].number if target is aten._unsafe_view.default else None
    if traits.viewed is not None:
        return int(args[traits.viewed].number)
    where = traits.written[0]
    return int((args[where] if isinstance(where, int) else kwargs[where]).number)


@functools.cache
def functional_of(func: Op) -> Op | None:
    """The operation that computes the same without writing."""
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
