"""Collectives among the members that live: one that dies is left out, and the others begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from aiodaft._runtime.groups.collectives import DEATHS, place_of, place_of_living
from aiodaft.ref import Ref, Refs

__all__ = ["Survivors", "among_survivors"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Survivors(NamedTuple, Generic[R]):
    """The result of a collective among survivors.

    Attributes:
        ranks: The places of the values that are in the results, among the refs that were given.
        refs: The results of their members, in this order.
    """

    ranks: tuple[int, ...]
    refs: Refs[R]


async def among_survivors(
    collective: Callable[Concatenate[Iterable[Ref[T]], P], Refs[R]],
    refs: Iterable[Ref[T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Survivors[R]:
    """Carry out a collective among the members that live: `await among_survivors(all_reduce, gradients, "sum")`.

    Values of members that have died, or die in the middle, are left out, and the others begin again: all results are
    made of the values of the same members. It returns when they exist.

    Args:
        collective: `all_reduce`, `reduce_scatter`, `all_gather`, or a function of yours that takes and gives refs so.
        refs: The values, one for each member.
        args: Other arguments of the collective.
        kwargs: The same, by keyword.

    Raises:
        ActorDied, PeerLost: No value is left, or the death is not that of a member.
        Exception: The error of a value or a result that is no death.

    Cancellation: as for the results of the collective.
    """
    values = dict(enumerate(refs))
    while True:
        places = [place_of(ref) for ref in values.values()]
        results = collective(list(values.values()), *args, **kwargs)
        error = await _error_of(results)
        if error is None:
            return Survivors(tuple(values), results)
        if not isinstance(error, DEATHS):
            raise error
        found = await asyncio.gather(*map(place_of_living, values.values()))
        if found == places:
            raise error
        values = {rank: ref for (rank, ref), place in zip(values.items(), found, strict=True) if place is not None}
        if not values:
            raise error


async def _error_of(results: Refs[Any]) -> BaseException | None:
    """The error of results, once all exist or have failed: rather one that is no death."""
    await asyncio.gather(*(result.ready() for result in results))
    errors = [error for result in results if (error := result.exception()) is not None]
    return min(errors, key=lambda error: isinstance(error, DEATHS), default=None)
