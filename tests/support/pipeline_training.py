"""Ranks of the GPT example that count the activations they really hold."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from pp_ranks import Rank
from torch import Tensor

import aiodaft


class _Held:
    """Lives as long as the backward pass of one forward has its tensors."""


class CountingRank(Rank):
    """Counts forwards with activations in memory, by the tensors of autograd and not by the belief of the rank."""

    def __init__(self, stages: list[int], of: int, microbatches: int, split: bool) -> None:
        super().__init__(stages, of, microbatches, split)
        self.held: list[weakref.ref[_Held]] = []
        self.most = 0
        for stage in self.stages.values():
            stage.forward = functools.partial(self._forward_counted, stage.forward)  # type: ignore[method-assign]  # that of one object

    def _forward_counted(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        held = _Held()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (held, saved), lambda packed: packed[1]):
            y = forward(x)
        self.held = [*(one for one in self.held if one() is not None), weakref.ref(held)]
        self.most = max(self.most, len(self.held))
        return y

    @aiodaft.method
    def take_most_held(self) -> int:
        """The most of them at a time since the last time."""
        most, self.most = self.most, 0
        return most

    @aiodaft.method
    def held_now(self) -> int:
        """The number of them now."""
        return sum(one() is not None for one in self.held)
