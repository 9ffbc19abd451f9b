"""Views and writes: which tensors of a program share memory, and which numbers hold their values now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from aiodaft.tensor.instructions import slots_of

__all__ = ["Aliases", "View", "is_view", "written_arguments"]

aten = torch.ops.aten

_WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Written in training, though the schema does not say it."""


class View(NamedTuple):
    """The operation that made a view.

    Attributes:
        base: The tensor that it is a view of.
        place: Which of the results of the operation, such as a split.
        attached: Whether the local tensor shares the memory of the local base: no redistribution came between.
    """

    base: int
    op: OpOverload[..., Any]
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
        """`number` is a view."""
        self.views[number] = view
        self._children.setdefault(view.base, []).append(number)

    def root(self, number: int) -> int:
        """The tensor that is no view, whose memory this is."""
        while (view := self.views.get(number)) is not None:
            number = view.base
        return number

    def is_attached(self, number: int) -> bool:
        """Whether a write to it reaches its base."""
        while (view := self.views.get(number)) is not None:
            if not view.attached or number in self.stale:
                return False
            number = view.base
        return True

    def family(self, number: int) -> Iterator[int]:
        """It and all views of it."""
        yield number
        for child in self._children.get(number, ()):
            yield from self.family(child)

    def made_again(self, number: int, held: int) -> None:
        """A stale view is `held` from now on."""
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
        """Nobody uses it any more."""
        if not self._children.get(number):
            view = self.views.pop(number, None)
            if view is not None:
                self._children[view.base].remove(number)
            self.now.pop(number, None)
            self.stale.discard(number)


@cache
def is_view(op: OpOverload[..., Any]) -> bool:
    """Whether its results share the memory of its first argument, which it does not write."""
    returned = op._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


@cache
def _written_names(op: OpOverload[..., Any]) -> tuple[str, ...]:
    written = [one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return (*written, *_WRITES.get(op, ()))


def written_arguments(op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """The numbers of the tensors that it writes."""
    names = _written_names(op)
    if not names:
        return []
    given = {**dict(zip([one.name for one in op._schema.arguments], args, strict=False)), **kwargs}
    if op in _WRITES and not given.get("training"):
        return []
    return slots_of([given.get(name) for name in names])
