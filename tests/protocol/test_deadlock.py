"""Deadlocks are found whenever there is one, and never where there is none (row CR8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft._protocol.calls.mailbox import Stage
from aiodaft._protocol.diagnostics.failures import (
    CallAt,
    Deadlock,
    Phase,
    Place,
    Reason,
    Search,
    Waiting,
    knots,
    place_of,
    reduced,
)
from aiodaft._protocol.ids import CallId, PeerId, sibling_ids
from aiodaft.exceptions import LocalProtocolError, WaitingCall


def call(number: int, host: str = "w") -> CallAt:
    return CallAt(PeerId(host), PeerId("owner"), CallId(number))


def waiting(*on: int, begun: bool = True, stamp: int = 0) -> Waiting:
    """A call that waits for others, by their numbers."""
    reason = Reason.AWAITS if begun else Reason.QUEUED
    return Waiting("A-1", "A.m", "a.py:7 in m" if begun else "", begun, reason, (stamp,), tuple(map(call, on)))


def test_an_error_names_the_users_calls_and_says_which_of_them_meet_in_a_collective() -> None:
    running, queued = waiting(2), waiting(4, begun=False)
    # The runtime's own calls, by which the first one waits for the other.
    own = {2: replace(waiting(3), own=True), 3: replace(waiting(5), own=True, reason=Reason.MEETS)}
    known = {call(number): one for number, one in {1: running, **own, 5: queued, 4: waiting(1)}.items()}
    (deadlock,) = run(Search([call(1)]), known.__getitem__)
    assert deadlock.victim == call(5)
    assert len(deadlock.cycle) == 3
    begun = "A.m of A-1 (a.py:7 in m)"
    story = f"{begun} awaits {begun}, which waits in a collective for A.m of A-1, which is queued behind A.m of A-1;"
    assert str(deadlock).startswith(story)
    assert "let one of them make all calls whose methods meet in collectives" in str(deadlock)


@pytest.mark.parametrize(("serial", "is_younger"), [(6, False), (8, True)])
def test_a_call_of_a_group_is_as_young_as_its_serial_says(serial: int, is_younger: bool) -> None:
    alone, member = call(7), call(sibling_ids(CallId(serial), 2)[1])
    known = {
        alone: replace(waiting(begun=False), on=(member,)),
        member: replace(waiting(begun=False), on=(alone,)),
    }
    (deadlock,) = run(Search([alone]), known.__getitem__)
    assert deadlock.victim == (member if is_younger else alone)


def test_a_strand_of_a_graph_is_older_than_any_call() -> None:
    alone, strand = call(7), call(-1 - (1 << 60))._replace(within=(1, 2))
    known = {
        alone: replace(waiting(begun=False), on=(strand,)),
        strand: replace(waiting(begun=False), on=(alone,)),
    }
    (deadlock,) = run(Search([strand]), known.__getitem__)
    assert deadlock.victim == alone


def test_none_of_the_runtimes_own_calls_is_given_up() -> None:
    known = {call(1): waiting(2), call(2): replace(waiting(1), own=True, reason=Reason.MEETS)}
    (deadlock,) = run(Search([call(2)]), known.__getitem__)
    assert deadlock.victim == call(1)
    assert str(deadlock).startswith("A.m of A-1 (a.py:7 in m) waits in a collective for A.m of A-1;")


def asked_by(search: Search) -> list[CallAt]:
    return [at for calls in search.questions.values() for at in calls]


def run(search: Search, look: Callable[[CallAt], Waiting | None]) -> list[Deadlock]:
    while asked := asked_by(search):
        search.handle_answers({at: look(at) for at in asked})
    assert search.phase is Phase.OVER
    return search.deadlocks


def reachable(start: int, graph: dict[int, frozenset[int]]) -> set[int]:
    """A call, and everything that it waits for, directly or not."""
    found, ahead = {start}, [start]
    while ahead:
        for other in graph[ahead.pop()] - found:
            found.add(other)
            ahead.append(other)
    return found


def stuck_by_definition(graph: dict[int, frozenset[int]]) -> set[int]:
    """The calls that lead only to calls that wait; the slow and obvious way."""
    return {one for one in graph if all(graph[other] for other in reachable(one, graph))}


def subsets(numbers: Iterable[int]) -> list[frozenset[int]]:
    pool = list(numbers)
    return [frozenset(one) for one in chain.from_iterable(combinations(pool, size) for size in range(len(pool) + 1))]


def test_every_graph_of_three_calls_is_judged_rightly() -> None:
    for edges in product(subsets(range(3)), repeat=3):
        graph = dict(enumerate(edges))
        expected = stuck_by_definition(graph)
        asked = {call(one): waiting(*sorted(on)) if on else None for one, on in graph.items()}
        assert set(reduced({at: one for at, one in asked.items() if one is not None})) == set(map(call, expected))
        for root in graph:
            found = run(Search([call(root)]), asked.__getitem__)
            # A search finds something if its root leads to stuck calls, and each find is a cycle of them.
            assert bool(found) == bool(reachable(root, graph) & expected)
            for deadlock in found:
                after = [*deadlock.calls[1:], deadlock.calls[0]]
                for one, other in zip(deadlock.calls, after, strict=True):
                    assert other.number in graph[one.number]
                    assert one.number in expected


graphs = st.integers(1, 12).flatmap(
    lambda size: st.lists(st.frozensets(st.integers(0, size - 1), max_size=3), min_size=size, max_size=size)
)


@given(graphs, st.data())
def test_large_graphs_are_judged_rightly_and_all_searches_name_the_same_victim(
    edges: list[frozenset[int]], data: st.DataObject
) -> None:
    graph = dict(enumerate(edges))
    begun = data.draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges)))
    expected = stuck_by_definition(graph)
    known = {call(one): waiting(*sorted(on), begun=begun[one]) if on else None for one, on in graph.items()}
    victims_of: dict[frozenset[CallAt], set[CallAt]] = {}
    all_knots = [frozenset(knot) for knot in knots({call(one): known[call(one)] or waiting() for one in expected})]
    for root in graph:
        found = run(Search([call(root)]), known.__getitem__)
        assert bool(found) == bool(reachable(root, graph) & expected)
        for deadlock in found:
            knot = next(knot for knot in all_knots if deadlock.victim in knot)
            victims_of.setdefault(knot, set()).add(deadlock.victim)
    assert {len(victims) for victims in victims_of.values()} <= {1}
    for knot, (victim,) in victims_of.items():
        not_begun = [one for one in knot if not begun[one.number]]
        assert victim == max(not_begun or knot, key=lambda one: one.number)
    found = run(Search(known), known.__getitem__)
    assert {deadlock.victim for deadlock in found} == {victim for victims in victims_of.values() for victim in victims}


class World:
    """Calls that go on during a search: each wakes when one that it waits for has moved, and waits again."""

    def __init__(self, seed: int, size: int = 4) -> None:
        self.random = Random(seed)
        self.on: dict[int, frozenset[int]] = {one: frozenset() for one in range(size)}
        self.moves = dict.fromkeys(range(size), 0)
        self.woken = dict.fromkeys(range(size), True)

    def look(self, at: CallAt) -> Waiting | None:
        on = self.on[at.number]
        return waiting(*sorted(on), stamp=self.moves[at.number]) if on and not self.woken[at.number] else None

    def step(self) -> None:
        """One call that can move does: it then waits for some others, or just runs."""
        free = [one for one, woken in self.woken.items() if woken]
        if not free:
            return
        one = self.random.choice(free)
        self.moves[one] += 1
        for other, on in self.on.items():
            self.woken[other] |= one in on
        self.on[one] = frozenset(self.random.sample(sorted(self.on), self.random.choice((0, 1, 1, 1, 2))))
        self.woken[one] = not self.on[one]

    def waits(self) -> dict[int, frozenset[int]]:
        return {one: frozenset() if self.woken[one] else on for one, on in self.on.items()}


def test_calls_that_move_while_they_are_looked_at_are_never_accused() -> None:
    accused = 0
    for seed in range(3_000):
        world = World(seed)
        search = Search([call(0)])
        for _ in range(world.random.randrange(12)):
            for _ in range(world.random.randrange(3)):
                world.step()
            # Some of the answers come now, the others after more has happened.
            asked = [at for at in asked_by(search) if world.random.random() < 0.6]
            if asked:
                search.handle_answers({at: world.look(at) for at in asked})
        # From here on nothing moves: a deadlock of now must be found by a search that begins now.
        stuck = stuck_by_definition(world.waits())
        for deadlock in run(search, world.look) if search.questions else search.deadlocks:
            accused += 1
            assert {at.number for at in deadlock.calls} <= stuck
        assert bool(run(Search([call(0)]), world.look)) == bool(reachable(0, world.waits()) & stuck)
    assert accused > 100


def test_a_call_that_woke_between_the_two_rounds_is_not_stuck() -> None:
    search = Search([call(1)])
    search.handle_answers({call(1): waiting(2)})
    search.handle_answers({call(2): waiting(1, stamp=1)})
    assert search.phase is Phase.CONFIRMING
    search.handle_answers({call(1): waiting(2), call(2): waiting(1, stamp=2)})
    assert search.deadlocks == []


def test_the_story_names_each_call_and_the_line_it_waits_at() -> None:
    known = {call(1): waiting(2), call(2): waiting(1, begun=False)}
    (deadlock,) = run(Search([call(1)]), known.__getitem__)
    assert deadlock.calls == (call(1), call(2))
    assert str(deadlock) == ("A.m of A-1 (a.py:7 in m) awaits A.m of A-1, which is queued behind A.m of A-1")
    assert deadlock.cycle == (WaitingCall("A-1", "A.m", "a.py:7 in m"), WaitingCall("A-1", "A.m", ""))


def test_questions_are_grouped_by_the_process_that_runs_the_calls() -> None:
    search = Search([call(3, "b"), call(1, "b"), call(2, "a")])
    assert list(search.questions.items()) == [("a", [call(2, "a")]), ("b", [call(1, "b"), call(3, "b")])]


@pytest.mark.parametrize(
    ("stage", "begun", "on_thread", "fetching", "place"),
    [
        (Stage.STARTED, True, False, False, Place.TASK),
        (Stage.CANCELLED, True, True, False, Place.THREAD),
        (Stage.FETCHING, False, True, True, Place.ARGUMENTS),
        (Stage.FETCHING, False, False, False, Place.INPUTS),
        (Stage.QUEUED, False, True, False, Place.MAILBOX),
        (Stage.STARTED, False, True, False, Place.BACKLOG),
        (Stage.STARTED, False, False, False, None),
        (Stage.WITHDRAWN, False, False, False, None),
    ],
)
def test_where_a_call_waits(stage: Stage, begun: bool, on_thread: bool, fetching: bool, place: Place | None) -> None:
    assert place_of(stage, begun=begun, on_thread=on_thread, fetching=fetching) is place


def test_a_call_awaits_needs_or_is_queued() -> None:
    reasons = [Reason.AWAITS, Reason.AWAITS, Reason.NEEDS, Reason.NEEDS, Reason.QUEUED, Reason.QUEUED]
    assert [place.reason for place in Place] == reasons


def test_a_chain_that_cannot_be_read_is_given_up() -> None:
    search = Search([call(0)])
    for number in range(2_000):
        if not search.questions:
            break
        search.handle_answers({call(number): waiting(number + 1)})
    assert search.phase is Phase.OVER
    assert search.deadlocks == []


def test_only_what_was_asked_can_be_answered() -> None:
    with pytest.raises(LocalProtocolError, match="no question was asked"):
        Search([call(1)]).handle_answers({call(2): None})
