"""From a program of whole tensors and a strategy to the instructions of every rank. Pure: it needs no process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from aiodaft.tensor.operations import Trace
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.planner import Planner
from aiodaft.tensor.reports import place_of
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.staging import PIPELINE_AXIS, plan_stages
from aiodaft.tensor.strategy import Strategy

__all__ = ["ImplicitCollectives", "plan"]

logger = logging.getLogger("aiodaft.tensor")


class ImplicitCollectives(ValueError):
    """A plan has collectives that its strategy does not ask for, and the strategy says `implicit="error"`."""


def plan(trace: Trace, micro: Callable[[int], Trace], strategy: Strategy, axes: Mapping[str, int]) -> Plan:
    """The plan of a program on a group with these axes.

    Args:
        trace: The program.
        micro: Gives the program of one of so many micro-batches.
        strategy: The placements.
        axes: Names and sizes; ranks are row-major.

    Raises:
        ValueError: A pattern of the strategy fits no name, an axis is unknown, a placement does not fit a shape, or the
            stages do not fit the axis `pp`.
        ImplicitCollectives: The strategy allows none, and an operation needs one; it names all of them.
    """
    if not axes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in axes.values()):
        raise ValueError(f"axes are {dict(axes)!r}: give names and sizes, such as {{'dp': 2, 'tp': 4}}")
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
