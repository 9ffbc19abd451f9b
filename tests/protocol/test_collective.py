"""Plans of collectives, carried out on texts that show the combined values."""

from __future__ import annotations

from typing import Any

import pytest

from aiodaft._protocol.groups import collective
from aiodaft._protocol.groups.collective import (
    ALL_REDUCE,
    FEW,
    LARGE,
    MEDIUM,
    QUICK,
    SMALL,
    Cut,
    Plan,
    Step,
    Work,
    choose,
    runs_on_loop,
)

SIZES = range(1, 10)
IN_ORDER = ("exchange", "star", "shared", "direct", "tree")


def letters(members: int) -> str:
    return "abcdefghi"[:members]


def do(step: Step, inputs: list[Any], parts: int) -> Any:
    """Carry out a step. A value is a list of `parts` texts; to reduce is to write one behind the other."""
    cut = [value if step.cut is Cut.WHOLE or len(value) == 1 else [value[step.part]] for value in inputs]
    match step.work:
        case Work.TAKE | Work.CUT:
            (only,) = cut
            return only
        case Work.REDUCE | Work.TOTAL:
            assert len({len(value) for value in cut}) == 1
            return ["".join(texts) for texts in zip(*cut, strict=True)]
        case Work.LIST:
            return cut
        case Work.JOIN:
            return [text for value in cut[1:] for text in value]


def carried_out(plan: Plan) -> list[Any]:
    """The results, if member i has the value [i0, i1, ...] of its letter and the numbers of the parts."""
    values: list[Any] = [[f"{letter}{part}" for part in range(plan.parts)] for letter in letters(plan.members)]
    for step in plan.steps:
        assert all(number < len(values) for number in step.inputs)
        values.append(do(step, [values[number] for number in step.inputs], plan.parts))
    return [values[number] for number in plan.results]


def combined(members: int, part: int) -> str:
    return "".join(f"{letter}{part}" for letter in letters(members))


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_members_get_every_value_once_and_in_the_same_order(name: str, members: int) -> None:
    plan = ALL_REDUCE[name](members)
    results = carried_out(plan)
    assert [plan.rank_of(number) for number in plan.results] == list(range(members))
    assert all(result == results[0] for result in results)
    for part, text in enumerate(results[0]):
        expected = combined(members, part)
        assert sorted(text[::2]) == list(letters(members))
        assert set(text[1::2]) == {str(part)}
        if name in IN_ORDER:
            assert text == expected


@pytest.mark.parametrize("members", SIZES)
def test_a_result_is_made_by_a_step_and_is_no_value_of_a_member(members: int) -> None:
    for algorithm in ALL_REDUCE.values():
        assert min(algorithm(members).results) >= members


def moved(plan: Plan) -> int:
    """The parts of values that go from member to member."""
    size = [plan.parts] * plan.members
    total = 0
    for step in plan.steps:
        cut = [1 if step.cut is not Cut.WHOLE else size[number] for number in step.inputs]
        # Without shared memory, a value travels whole, even if the step uses a part.
        total += sum(size[number] for number in step.inputs if plan.rank_of(number) != step.rank)
        size.append(sum(cut[1:]) if step.work is Work.JOIN else cut[0])
    return total


@pytest.mark.parametrize("members", range(2, 10))
def test_direct_and_ring_move_the_fewest_bytes(members: int) -> None:
    # Every member sends and gets n - 1 parts to be reduced, and n - 1 reduced ones.
    fewest = 2 * members * (members - 1)
    assert moved(ALL_REDUCE["direct"](members)) == fewest
    assert moved(ALL_REDUCE["ring"](members)) == fewest


@pytest.mark.parametrize("members", SIZES)
def test_reduce_and_its_scattered_form(members: int) -> None:
    whole = [combined(members, part) for part in range(members)]
    for by_parts in (False, True):
        for root in range(members):
            plan = collective.reduce(members, root, by_parts=by_parts)
            assert carried_out(plan) == [whole]
            assert plan.rank_of(plan.results[0]) == root
    for one_memory in (False, True):
        plan = collective.reduce_scatter(members, one_memory=one_memory)
        assert carried_out(plan) == [[text] for text in whole]
        assert [plan.rank_of(number) for number in plan.results] == list(range(members))


@pytest.mark.parametrize("members", SIZES)
def test_lists_of_values_and_of_items(members: int) -> None:
    values = [[f"{letter}{part}" for part in range(members)] for letter in letters(members)]
    assert carried_out(collective.all_gather(members)) == [values] * members
    for root in range(members):
        plan = collective.gather(members, root)
        assert carried_out(plan) == [values]
        assert plan.rank_of(plan.results[0]) == root
    for one_memory in (False, True):
        plan = collective.all_to_all(members, one_memory=one_memory)
        assert carried_out(plan) == [[[value[part]] for value in values] for part in range(members)]
        assert [plan.rank_of(number) for number in plan.results] == list(range(members))


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("receivers", SIZES)
def test_one_value_for_many(receivers: int, one_memory: bool) -> None:
    items = [f"a{part}" for part in range(receivers)]
    plan = collective.hand_out(receivers, Cut.WHOLE, one_memory=one_memory)
    assert carried_out(plan) == [items] * receivers
    assert [plan.rank_of(number) for number in plan.results] == list(range(1, receivers + 1))
    plan = collective.hand_out(receivers, Cut.ITEM, one_memory=one_memory)
    assert carried_out(plan) == [[item] for item in items]
    assert [plan.rank_of(number) for number in plan.results] == list(range(1, receivers + 1))


@pytest.mark.parametrize("members", range(2, 10))
def test_a_result_that_others_take_is_not_reduced_in_memory_that_they_share(members: int) -> None:
    for algorithm in ALL_REDUCE.values():
        plan = algorithm(members)
        for number, step in enumerate(plan.steps, plan.members):
            taken = any(number in other.inputs and other.rank != step.rank for other in plan.steps)
            assert (step.work is Work.TOTAL) == (
                step.work in {Work.TOTAL, Work.REDUCE} and taken and number in plan.results
            )


def test_the_values_that_a_member_makes_of_its_own_one_for_others_alone() -> None:
    for algorithm in ALL_REDUCE.values():
        plan = algorithm(5)
        assert [plan.beside(rank, result) for rank, result in enumerate(plan.results)] == [[]] * 5
    plan = collective.reduce(3, 1, by_parts=True)
    assert [plan.beside(0, None), plan.beside(1, plan.results[0]), plan.beside(2, None)] == [[3], [], [5]]
    plan = collective.all_to_all(2, one_memory=False)
    assert [plan.beside(rank, result) for rank, result in enumerate(plan.results)] == [[5], [3]]
    # The root gets an item of its own list.
    plan = collective.hand_out(2, Cut.ITEM, one_memory=False)
    assert plan.beside(0, plan.results[0]) == [3]


def chosen(members: int, nbytes: int | None, *, elementwise: bool = True) -> tuple[str, str]:
    """The algorithm on one machine, and on several."""
    here, apart = (choose(members, nbytes, one_memory=one, elementwise=elementwise) for one in (True, False))
    return here, apart


def test_the_algorithm_is_chosen_by_members_size_memory_and_reducer() -> None:
    for nbytes in (None, 1, SMALL, LARGE):
        assert chosen(1, nbytes, elementwise=False) == ("exchange", "exchange")
        assert chosen(2, nbytes) == ("exchange", "exchange")
    for elementwise in (False, True):
        assert chosen(FEW, SMALL, elementwise=elementwise) == ("exchange", "exchange")
        assert chosen(FEW + 1, SMALL, elementwise=elementwise) == ("star", "star")
    assert chosen(2, SMALL + 1, elementwise=False) == chosen(3, None, elementwise=False) == ("star", "star")
    assert chosen(3, None) == ("star", "direct")
    assert chosen(4, MEDIUM) == ("star", "star")
    assert chosen(4, MEDIUM + 1) == chosen(4, LARGE // 4) == ("star", "direct")
    assert chosen(4, LARGE // 4 + 1) == ("shared", "direct")


def test_what_takes_long_runs_on_a_thread() -> None:
    def on_loop(work: Work, nbytes: int, *, by_function: bool = False) -> bool:
        return runs_on_loop(work, nbytes, by_function=by_function)

    assert on_loop(Work.REDUCE, QUICK)
    assert not on_loop(Work.REDUCE, QUICK + 1)
    assert not on_loop(Work.REDUCE, 1, by_function=True)
    # It gives its inputs as they are.
    assert on_loop(Work.LIST, LARGE)
    for work in (Work.TAKE, Work.CUT, Work.JOIN):
        assert on_loop(work, SMALL)
        assert not on_loop(work, SMALL + 1)
