"""A program: the trace of a step, and what can be done with it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.operations import Operation, Trace, place_of
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.planner import Planner
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.stage_runs import PIPELINE_AXIS
from aiodaft.tensor.staging import plan_stages
from aiodaft.tensor.strategy import Strategy

logger = logging.getLogger("aiodaft.tensor")


class ImplicitCollectives(ValueError):
    """A plan has collectives that its strategy does not ask for, and the strategy says `implicit="error"`."""


@dataclass(frozen=True)
class Program(Trace):
    """The operations of one step on whole tensors. It knows no strategy: `plan` makes the plan of one.

    Attributes:
        again: Captures the function anew, with arguments of one of so many micro-batches.
    """

    again: Callable[[int], Program] | None = field(default=None, repr=False, compare=False)

    def plan(self, strategy: Strategy, axes: Mapping[str, int]) -> Plan:
        """The plan of this strategy on a group with these axes; no process is needed for it.

        Args:
            axes: Names and sizes, such as `{"dp": 2, "tp": 4}`; ranks are row-major.

        Raises:
            ValueError: A pattern of the strategy fits no name, an axis is unknown, a placement does not fit a shape, or
                the stages do not fit the axis `pp`.
            ImplicitCollectives: The strategy allows none, and operations need some; all are named.
        """
        return plan(self, self.micro, strategy, axes)

    def micro(self, count: int) -> Program:
        """The program of a micro-batch: of the same function, with 1/count of the rows of each argument.

        Raises:
            ValueError: An argument has no rows, or a number of them that `count` does not divide.
        """
        if count == 1:
            return self
        for name, meta, _ in self.arguments.leaves:
            if meta is not None and (not meta.shape or meta.shape[0] % count):
                raise ValueError(f"{name} of shape {meta.shape} cannot be cut into {count} micro-batches of equal rows")
        if self.again is None:
            raise ValueError("this program was not captured here: there is no function to capture anew")
        return self.again(count)

    def describe(self) -> str:
        """Inputs with their sizes, and the operations of each phase with their numbers, as a text."""
        lines = []
        for role in ("parameter", "buffer", "state", "argument", "constant"):
            metas = [self.metas[one.slot] for one in self.inputs if one.role == role]
            if metas:
                size = sum(one.nbytes for one in metas)
                lines.append(f"{len(metas):6} {role}s, {size:,} bytes")
        operations = [one for one in self.operations if isinstance(one, Operation)]
        for phase in ("forward", "backward", "update"):
            counts = Counter(str(one.target) for one in operations if one.cause.phase == phase)
            if counts:
                most = ", ".join(f"{count} {name}" for name, count in counts.most_common(5))
                lines.append(f"{counts.total():6} operations in {phase}: {most}{', ...' * (len(counts) > 5)}")
        return "\n".join(lines)

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


def check_axes(axes: Mapping[str, int]) -> None:
    if not axes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in axes.values()):
        raise ValueError(f"axes are {dict(axes)!r}: give names and sizes, such as {{'dp': 2, 'tp': 4}}")


def plan(trace: Trace, micro: Callable[[int], Trace], strategy: Strategy, axes: Mapping[str, int]) -> Plan:
    """See `Program.plan`; `micro` gives the program of one of so many micro-batches."""
    check_axes(axes)
    if strategy.stages or strategy.microbatches > 1 or axes.get(PIPELINE_AXIS, 1) > 1:
        made = plan_stages(micro(strategy.microbatches), strategy, axes)
        made = replace(made, arguments=trace.arguments)
    else:
        made = Planner(trace, strategy, Rules(axes)).made()
    if strategy.implicit != "allow" and (implicit := [one for one in made.collectives if not one.written]):
        listed = "\n".join(f"  {one.kind} on {one.axis}: {place_of(one.cause)}" for one in implicit)
        message = f"{len(implicit)} collectives that the strategy does not ask for:\n{listed}"
        if strategy.implicit == "error":
            raise ImplicitCollectives(message)
        logger.warning(message)
    return made
