"""Calls of the members of a group: which one is called next, and calls that are made together, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import Any, Final, NamedTuple

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.groups.turns import runs_in_turn
from aiodaft._protocol.ids import CallId, roster_at
from aiodaft._runtime.groups import siblings
from aiodaft.actor import CallTarget
from aiodaft.methods import MethodSpec
from aiodaft.policies import Load, Policy
from aiodaft.ref import Ref, Refs, Stream

# The numbers of calls that do not belong together.
_ALONE: Final[Iterator[CallId | None]] = repeat(None)


class Unit(NamedTuple):
    """Members that are called as one.

    Attributes:
        rank: That of the member whose result counts.
        target: This member.
        others: The others.
    """

    rank: int
    target: CallTarget
    others: tuple[CallTarget, ...]

    def health(self) -> int:
        health = self.target.health().value
        return max(health, *(other.health().value for other in self.others)) if self.others else health


class MemberCalls:
    """Makes the calls of one group, also by its views, in any thread; knows which are under way."""

    def __init__(self) -> None:
        self._under_way: dict[CallTarget, set[Any]] = {}
        # The start of the search for a free member.
        self._turns = count()

    def forget(self, member: CallTarget) -> set[Any]:
        """A member leaves the group; returns the calls of it that are under way."""
        return self._under_way.pop(member, set())

    def begin(self, member: CallTarget, call: Any) -> None:
        """A call, or a stream, is under way from now until it is over."""
        under_way = self._under_way.setdefault(member, set())
        under_way.add(call)
        call.watch(under_way.discard)

    def of(self, member: CallTarget) -> Collection[Any]:
        return self._under_way.get(member, ())

    def under_way(self, member: CallTarget) -> int:
        return len(self.of(member))

    def choose(self, units: list[Unit], policy: Policy, full: Collection[CallTarget]) -> Unit:
        """The next unit to call: of the healthiest, one that is not `full`, by the policy."""
        turn = next(self._turns) % len(units)
        turned = units[turn:] + units[:turn]
        health = [unit.health() for unit in turned]
        free = [unit for unit, seen in zip(turned, health, strict=True) if seen == min(health)]
        free = [unit for unit in free if unit.target not in full] or free
        under_way = self._under_way
        loads = [Load(unit.rank, len(under_way.get(unit.target, ())), unit.target.distance()) for unit in free]
        return free[policy(loads)]

    def call_all(
        self,
        calls: Sequence[tuple[Unit, tuple[Any, ...]]],
        spec: MethodSpec,
        kwargs: dict[str, Any],
        roster: Roster[Any] | None,
    ) -> Refs[Any]:
        """Call several units, with their arguments; `roster`: of their group, if its members meet in collectives."""
        each = [(target, args) for unit, args in calls for target in (unit.target, *unit.others)]
        numbers = _ALONE
        if calls and roster is not None:
            in_turn = runs_in_turn(spec.rules) and len(each) == roster.size > 1
            numbers = siblings.numbers(each[0][0], len(each), roster_at(roster.epoch) if in_turn else 0)
        refs = self._make(each, spec, kwargs, numbers)
        siblings.join(refs)
        made = iter(refs)
        units = [list(islice(made, 1 + len(unit.others))) for unit, _ in calls]
        return Refs([first for first, *_ in units], [other for _, *others in units for other in others])

    def call(self, unit: Unit, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        targets = (unit.target, *unit.others)
        numbers = siblings.numbers(unit.target, len(targets)) if unit.others else _ALONE
        ref, *others = self._make([(target, args) for target in targets], spec, kwargs, numbers)
        if others:
            # Until then, they are held: an error that no code sees goes to the scope when the ref is dropped.
            ref._state.watch(partial(_end_others, others))
            siblings.join([ref, *others])
        return ref

    def stream(self, unit: Unit, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """Call a stream. Raises TypeError if the unit has several members."""
        if unit.others:
            raise TypeError(f"{spec.label} is a stream, which only one member can give: call it on that one")
        stream = unit.target.stream(spec, args, kwargs)
        self.begin(unit.target, stream._backend)
        return stream

    def _make(
        self,
        calls: Iterable[tuple[CallTarget, tuple[Any, ...]]],
        spec: MethodSpec,
        kwargs: dict[str, Any],
        numbers: Iterator[CallId | None],
    ) -> list[Ref[Any]]:
        """Make calls that belong together: all of them or none, because members may wait for each other."""
        refs: list[Ref[Any]] = []
        try:
            for target, args in calls:
                refs.append(target.call(spec, args, kwargs, next(numbers)))
                self.begin(target, refs[-1]._state)
        except BaseException:
            _take_back(refs)
            raise
        return refs


def _end_others(others: list[Ref[Any]], state: Any) -> None:
    if state.error is not None:
        _take_back(others)


def _take_back(refs: Iterable[Ref[Any]]) -> None:
    """Cancel calls. No code sees what becomes of them."""
    for ref in refs:
        ref._state.mark_seen()
        ref.cancel()
