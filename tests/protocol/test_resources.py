"""The resources of a node are counted: never more is given than there is, and the same amount comes back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.node.resources import Demand, Resources, Wish
from aiodaft.exceptions import InsufficientResources

_SLACK = 1e-6


def ledger(*, cpus: float = 8, gpus: int = 2, **custom: float) -> Resources[str]:
    return Resources(cpus=cpus, gpus=gpus, custom=custom)


def take(node: Resources[str], who: str, **needs: Any) -> tuple[int, ...]:
    return node.take(who, who.capitalize(), Demand(**needs))


# Valid demands.


@pytest.mark.parametrize("amount", [-1, -0.5, float("inf"), float("nan"), True, "1", None, [1]])
@pytest.mark.parametrize("name", ["cpus", "gpus", "tpu"])
def test_amounts_are_numbers_that_are_not_negative(name: str, amount: Any) -> None:
    needs = {name: amount} if name != "tpu" else {"custom": {name: amount}}
    with pytest.raises(ValueError, match=f"{name}=.*resources are numbers"):
        Demand(**needs)


@pytest.mark.parametrize("amount", [1.5, 2.25])
def test_gpus_are_whole_or_a_fraction_of_one(amount: float) -> None:
    with pytest.raises(ValueError, match="take whole GPUs, or a fraction of one"):
        Demand(gpus=amount)


@pytest.mark.parametrize("name", ["cpus", "gpus"])
def test_custom_resources_cannot_stand_in_for_the_builtin_ones(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Demand(custom={name: 1})
    with pytest.raises(ValueError, match=name):
        Demand(gpus=-1, cpus=-1, custom={name: 1})


def test_nothing_can_be_asked_for() -> None:
    node = ledger(cpus=0, gpus=0)
    assert take(node, "light") == ()
    assert take(node, "none of it", custom={"tpu": 0}) == ()
    node.give_back("light")
    node.give_back("none of it")
    assert node.free() == {"cpus": 0, "gpus": 0}


# GPUs.


def test_whole_gpus_are_exclusive() -> None:
    node = ledger(gpus=3)
    assert take(node, "one", gpus=2) == (0, 1)
    assert take(node, "two", gpus=1.0) == (2,)
    with pytest.raises(InsufficientResources):
        take(node, "three", gpus=0.1)


def test_fractions_share_a_gpu_and_leave_others_whole() -> None:
    node = ledger()
    assert take(node, "one", gpus=0.5) == (0,)
    assert take(node, "two", gpus=0.25) == (0,)
    assert take(node, "three", gpus=0.5) == (1,)
    # The fullest one that still has room.
    assert take(node, "four", gpus=0.25) == (0,)
    assert node.free()["gpus"] == pytest.approx(0.5)


def test_three_thirds_make_a_whole() -> None:
    node = ledger(gpus=1)
    assert [take(node, who, gpus=1 / 3) for who in "abc"] == [(0,)] * 3
    with pytest.raises(InsufficientResources):
        take(node, "d", gpus=0.01)
    for who in "bca":
        node.give_back(who)
    assert take(node, "whole", gpus=1) == (0,)


def test_a_gpu_with_a_fraction_taken_is_not_whole() -> None:
    node = ledger()
    take(node, "part", gpus=0.1)
    assert take(node, "whole", gpus=1) == (1,)
    with pytest.raises(InsufficientResources):
        take(node, "more", gpus=1)
    node.give_back("part")
    assert take(node, "more", gpus=1) == (0,)


def test_a_fraction_does_not_span_two_gpus() -> None:
    node = ledger()
    for who in "ab":
        take(node, who, gpus=0.6)
    assert node.free()["gpus"] == pytest.approx(0.8)
    with pytest.raises(InsufficientResources):
        take(node, "c", gpus=0.5)


# Giving back.


def test_what_was_taken_comes_back() -> None:
    node = ledger(tpu=4)
    before = node.free()
    take(node, "all", cpus=8, gpus=2, custom={"tpu": 4})
    assert node.free() == {"cpus": 0, "gpus": 0, "tpu": 0}
    node.give_back("all")
    assert node.free() == before


def test_giving_back_twice_or_without_having_changes_nothing() -> None:
    node = ledger()
    take(node, "one", gpus=1, cpus=4)
    take(node, "two", gpus=1)
    node.give_back("one")
    revision = node.revision
    for who in ("one", "stranger"):
        node.give_back(who)
    assert node.revision == revision
    assert node.free() == {"cpus": 8, "gpus": 1}


# Refusals.


@pytest.mark.parametrize("needs", [{"gpus": 3}, {"cpus": 9}, {"custom": {"tpu": 1}}, {"cpus": 1, "gpus": 3}])
def test_a_refusal_takes_nothing(needs: dict[str, Any]) -> None:
    node = ledger()
    before = node.free()
    with pytest.raises(InsufficientResources) as caught:
        take(node, "one", **needs)
    assert caught.value.executed is False
    assert node.free() == before
    node.give_back("one")
    assert node.free() == before


def test_a_refusal_says_what_there_is_and_who_has_it() -> None:
    node = ledger()
    take(node, "trainer", gpus=1)
    take(node, "helper", gpus=0.5)
    take(node, "other", cpus=1)
    with pytest.raises(InsufficientResources) as caught:
        take(node, "model", gpus=2)
    assert str(caught.value) == (
        "Model needs gpus=2, but this node has 2, of which 0.5 free: Trainer has 1, Helper has 0.5"
    )


@pytest.mark.parametrize(
    ("needs", "hint"), [({"gpus": 1}, r"Runtime\(gpus=\.\.\.\)"), ({"custom": {"tpu": 1}}, r"Runtime\(resources=.*tpu")]
)
def test_a_refusal_of_what_is_not_there_at_all_says_how_to_declare_it(needs: dict[str, Any], hint: str) -> None:
    with pytest.raises(InsufficientResources, match=f"has 0, of which 0 free; declare .*{hint}"):
        take(ledger(gpus=0), "model", **needs)


def test_a_refusal_of_what_is_only_taken_gives_no_such_hint() -> None:
    node = ledger(tpu=1)
    take(node, "one", custom={"tpu": 1})
    with pytest.raises(InsufficientResources, match="has 1, of which 0 free: One has 1$"):
        take(node, "two", custom={"tpu": 0.5})


# Several at once.


def test_several_are_reserved_together_or_not_at_all() -> None:
    node = ledger(gpus=3)
    take(node, "other", gpus=1)
    before, revision = node.free(), node.revision
    gang = [Wish(f"m{rank}", f"Model[{rank}]", Demand(gpus=1)) for rank in range(3)]
    with pytest.raises(InsufficientResources) as caught:
        node.take_all(gang)
    assert str(caught.value) == (
        "2 of 3 such actors fit: Model[2] needs gpus=1, but this node has 3, of which 2 free: Other has 1"
    )
    # A request that waits for room is not woken by the attempt of another.
    assert (node.free(), node.revision) == (before, revision)
    assert node.take_all(gang[:2]) == [(1,), (2,)]
    node.give_back("m0")
    assert node.revision > revision
    with pytest.raises(ValueError, match=r"Model\[1\] has its resources already"):
        node.take_all(gang)


def test_the_stock_is_what_is_left() -> None:
    node = ledger(cpus=4, gpus=3, tpu=2)
    take(node, "one", cpus=1, gpus=0.25)
    take(node, "two", gpus=1, custom={"tpu": 1})
    left = node.stock()
    assert left.totals == {"cpus": 4, "gpus": 3, "tpu": 2}
    assert (left.free["cpus"], left.free["tpu"], left.gpus) == (3, 1, (0.75, 0, 1))
    assert left.room_for(Demand(gpus=0.25), 100) == 7
    assert left.room_for(Demand(gpus=1), 100) == 1
    assert left.room_for(Demand(gpus=2), 100) == 0
    assert left.room_for(Demand(), 100) == 100
    assert left.room_for(Demand(cpus=1e-320), 100) == 100
    assert left.room_for(Demand(custom={"tape": 1}), 100) == 0
    assert left.all_free().room_for(Demand(gpus=1), 100) == 3


# Slices.


def carved() -> Resources[str]:
    """A node with a slice of two GPUs and two CPUs."""
    node = ledger(gpus=4, tpu=1)
    take(node, "other", gpus=1)
    assert node.carve("slice", "mesh", Demand(cpus=2, gpus=2)) == (1, 2)
    return node


def test_what_a_slice_has_comes_from_it_and_the_rest_from_the_node() -> None:
    node = carved()
    assert node.free() == {"cpus": 6, "gpus": 1, "tpu": 1}
    assert node.take("a", "A", Demand(cpus=1, gpus=1, custom={"tpu": 1}), "slice") == (1,)
    assert node.free() == {"cpus": 6, "gpus": 1, "tpu": 0}
    assert node.share_of("a") == (1, (1,))
    left = node.stock("slice")
    assert (left.totals["cpus"], left.free["cpus"], left.free["tpu"], left.gpus) == (2, 1, 0, (0, 1))
    with pytest.raises(InsufficientResources, match="B needs gpus=2, but this slice of mesh has 2, of which 1 free: A"):
        node.take("b", "B", Demand(gpus=2), "slice")
    with pytest.raises(InsufficientResources, match="B needs tpu=1, but this node has 1, of which 0 free: A has 1"):
        node.take("b", "B", Demand(gpus=1, custom={"tpu": 1}), "slice")
    assert node.stock("slice") == left
    node.give_back("a")
    node.give_back("slice")
    assert node.free() == {"cpus": 8, "gpus": 3, "tpu": 1}


def test_a_slice_has_whole_gpus() -> None:
    with pytest.raises(ValueError, match="gpus=0.5: a slice has whole GPUs"):
        ledger().carve("slice", "mesh", Demand(gpus=0.5))


def test_a_released_slice_ends_with_its_last_actor() -> None:
    node = carved()
    node.take("a", "A", Demand(gpus=1), "slice")
    node.take("b", "B", Demand(gpus=0.5), "slice")
    node.give_back("slice")
    with pytest.raises(InsufficientResources, match="slice of a mesh that is released"):
        node.take("c", "C", Demand(gpus=0.5), "slice")
    node.give_back("a")
    # Another actor of its process still uses the GPU.
    node.give_back("b", keep_gpus=True)
    assert node.free()["gpus"] == 1
    node.give_back("b")
    assert node.free() == {"cpus": 8, "gpus": 3, "tpu": 1}
    with pytest.raises(InsufficientResources, match="slice of a mesh that is released"):
        node.stock("slice")


def test_the_gpus_of_a_slice_are_claimed_until_it_ends() -> None:
    claims = OtherHas()
    node: Resources[str] = Resources(cpus=1, gpus=2, claims=claims)
    node.carve("slice", "mesh", Demand(gpus=2))
    node.take("a", "A", Demand(gpus=1), "slice")
    node.give_back("a")
    assert claims.mine == {0, 1}
    node.give_back("slice")
    assert claims.mine == set()


# Any history.

_demands = st.builds(
    Demand,
    cpus=st.sampled_from([0, 0.1, 1, 2.5, 4]),
    gpus=st.sampled_from([0, 0.1, 0.25, 1 / 3, 0.5, 2 / 3, 0.9, 1, 2, 3]),
    custom=st.sampled_from([{}, {"tpu": 0.3}, {"tpu": 1}]),
)


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["s", "t", "a", "b", "c", "d"]), st.sampled_from(["", "s", "t"]), _demands)))
def test_no_history_with_slices_overcommits_and_everything_comes_back(steps: list[tuple[str, str, Demand]]) -> None:
    node = ledger(cpus=6, gpus=3, tpu=1)
    held: dict[str, tuple[str, Demand, tuple[int, ...]]] = {}
    for who, within, demand in steps:
        if who in held:
            node.give_back(who)
            del held[who]
        elif who in {"s", "t"}:
            with suppress(ValueError, InsufficientResources):
                held[who] = "", demand, node.carve(who, who, demand)
        elif not within or within in held:
            with suppress(InsufficientResources):
                held[who] = within, demand, node.take(who, who, demand, within or None)
        for gpu in range(3):
            shares = [(within, min(1, demand.gpus)) for within, demand, gpus in held.values() if gpu in gpus]
            # Actors in a slice that is released still have their shares.
            outer = sum(share for within, share in shares if within not in held)
            assert outer <= 1 + _SLACK
            assert sum(share for within, share in shares) - outer <= 1 + _SLACK
        assert min(node.free().values()) >= -_SLACK
    for who in sorted(held):
        node.give_back(who)
    assert node.free() == pytest.approx({"cpus": 6, "gpus": 3, "tpu": 1}, abs=_SLACK)
    assert len(node) == 0


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), _demands), max_size=40))
def test_no_history_overcommits_or_refuses_what_is_there(steps: list[tuple[str, Demand]]) -> None:
    node = ledger(cpus=6, gpus=3, tpu=1)
    holders: dict[str, tuple[Demand, tuple[int, ...]]] = {}
    for who, demand in steps:
        used = [sum(min(1, d.gpus) for d, chosen in holders.values() if gpu in chosen) for gpu in range(3)]
        left = {
            "cpus": 6 - sum(d.cpus for d, _ in holders.values()),
            "tpu": 1 - sum(d.custom.get("tpu", 0) for d, _ in holders.values()),
            "gpus": 3 - sum(used),
        }
        assert node.free() == pytest.approx(left, abs=_SLACK)
        if who in holders:
            node.give_back(who)
            del holders[who]
            continue
        if demand.gpus < 1:
            fits = min(used) + demand.gpus <= 1 + _SLACK
        else:
            fits = sum(share < _SLACK for share in used) >= demand.gpus
        fits &= demand.cpus <= left["cpus"] + _SLACK and demand.custom.get("tpu", 0) <= left["tpu"] + _SLACK
        if not fits:
            with pytest.raises(InsufficientResources):
                node.take(who, who, demand)
            continue
        chosen = node.take(who, who, demand)
        assert len(set(chosen)) == len(chosen) == (-(-demand.gpus // 1))
        assert all(used[gpu] + min(1, demand.gpus) <= 1 + _SLACK for gpu in chosen)
        holders[who] = demand, chosen
    for who in holders:
        node.give_back(who)
    assert node.free() == pytest.approx({"cpus": 6, "gpus": 3, "tpu": 1}, abs=_SLACK)


class OtherHas:
    """Claims of GPUs, some of which another process has."""

    def __init__(self, *gpus: int) -> None:
        self.others = set(gpus)
        self.mine: set[int] = set()

    def take(self, gpu: int) -> str | None:
        if gpu in self.others:
            return f"user {gpu}"
        self.mine.add(gpu)
        return None

    def give_back(self, gpu: int) -> None:
        self.mine.remove(gpu)


def test_gpus_that_others_have_are_passed_over_and_named_if_none_is_left() -> None:
    claims = OtherHas(0, 2)
    ledger: Resources[str] = Resources(cpus=1, gpus=4, claims=claims)
    assert ledger.take("a", "A", Demand(gpus=1)) == (1,)
    with pytest.raises(
        InsufficientResources, match=r"B needs gpus=2.*; GPU 0 is in use by user 0, .*; GPU 2 is in use"
    ):
        ledger.take("b", "B", Demand(gpus=2))
    # Its claims of the two are free again.
    assert claims.mine == {1}
    assert ledger.take("c", "C", Demand(gpus=1)) == (3,)


def test_a_gpu_is_claimed_while_a_part_of_it_is_in_use() -> None:
    claims = OtherHas()
    ledger: Resources[str] = Resources(cpus=1, gpus=2, claims=claims)
    assert ledger.take("a", "A", Demand(gpus=0.5)) == ledger.take("b", "B", Demand(gpus=0.5)) == (0,)
    ledger.give_back("a")
    assert claims.mine == {0}
    ledger.give_back("b", keep_gpus=True)
    assert claims.mine == {0}
    ledger.give_back("b")
    assert claims.mine == set()
