"""A program: the trace of a step, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.operations import Operation, Trace

__all__ = ["Program"]


@dataclass(frozen=True)
class Program(Trace):
    """The operations of one step on whole tensors. It knows no strategy: `plan` makes the plan of one."""

    def values(self, state: Mapping[str, torch.Tensor], seed: int = 0) -> dict[str, Any]:
        """The first values of all inputs but arguments and scalars; copies, so that steps may write to them.

        Args:
            state: Parameters and buffers, as of `state_dict()`.
            seed: The seed of the random numbers of all steps.

        Raises:
            KeyError: `state` lacks a parameter or a buffer.
        """
        values: dict[str, Any] = {"random.seed": seed, "random.step": 0}
        for one in self.inputs:
            if one.role in ("parameter", "buffer", "state", "constant"):
                if one.value is not None:
                    values[one.name] = one.value.clone()
                elif one.fill is not None:
                    meta = self.metas[one.slot]
                    values[one.name] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).fill_(one.fill)
                if one.role != "constant" and one.name in state:
                    values[one.name] = state[one.name].detach().clone()
                if one.name not in values:
                    raise KeyError(f"there is no value for {one.name}")
        return values

    def run(self, values: dict[str, Any], *args: Any) -> Any:
        """Do one step in this process; `values` has the next values afterwards.

        Args:
            args: The arguments of the step, without models and optimizers.

        Returns:
            The result of the function.
        """
        given = {**values, **self.arguments.bind(*args)}
        table: dict[int, Any] = {
            one.slot: given[one.name] if one.name in given else self.scalars[one.name] for one in self.inputs
        }
        with torch.no_grad():
            for one in self.operations:
                if isinstance(one, Operation):
                    a, k = tree_map_only(Slot, lambda slot: table[slot.number], (one.args, dict(one.kwargs)))
                    result = one.target(*a, **k)
                    results = result if isinstance(result, (tuple, list)) else (result,)
                    table.update((out, one) for out, one in zip(one.outs, results, strict=True) if out is not None)
                else:
                    table[one.out] = table[one.source]
        values.update({one.name: table[one.slot] for one in self.outputs if one.role != "result"})
        values["random.step"] += 1
        return self.results.build(table[one.slot] for one in self.outputs if one.role == "result")
