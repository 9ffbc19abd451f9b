"""The places of actors, decided from views of nodes: an assignment meets every constraint, and a refusal is true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aiodaft._protocol.node.resources import Demand, Resources, Stock
from aiodaft._protocol.placement import Anchor, NodeView, Request, Unplaceable, Where, plan
from aiodaft.exceptions import InsufficientResources

_CPUS = 16.0


def stock(*, cpus: float = _CPUS, gpus: tuple[float, ...] = (), **custom: float) -> Stock:
    """The stock of a node with 16 CPUs; `cpus` and `gpus` are free."""
    totals = {"cpus": max(cpus, _CPUS), "gpus": float(len(gpus)), **dict.fromkeys(custom, 4.0)}
    return Stock(totals, {"cpus": cpus, **custom}, gpus)


def node(name: str, labels: dict[str, str] | None = None, *, actors: int = 0, **free: Any) -> NodeView:
    return NodeView(name, labels or {}, stock(**free), actors)


def gpu_node(name: str, free: int, total: int = 4) -> NodeView:
    return node(name, gpus=(1.0,) * free + (0.0,) * (total - free))


def request(
    count: int = 1, *, spread: bool = False, own_nodes: bool = False, label: str = "Model", **needs: Any
) -> Request:
    where = Where(**{name: needs.pop(name) for name in ("node", "labels", "near", "apart_from") if name in needs})
    return Request(label, Demand(**needs), count, where, spread, own_nodes)


def reason(nodes: list[NodeView], wish: Request) -> str:
    found = plan(nodes, wish)
    assert isinstance(found, Unplaceable)
    return found.reason


# Packing.


def test_one_actor_goes_to_the_fullest_node_that_has_room() -> None:
    nodes = [gpu_node("empty", 4), gpu_node("fuller", 2), gpu_node("full", 0)]
    assert plan(nodes, request(gpus=1)) == ("fuller",)
    assert plan(nodes, request(gpus=3)) == ("empty",)


def test_a_gang_takes_the_fewest_nodes_and_its_neighbours_in_rank_share_one() -> None:
    nodes = [gpu_node("a", 1), gpu_node("b", 4), gpu_node("c", 3)]
    assert plan(nodes, request(3, gpus=1)) == ("c",) * 3
    assert plan(nodes, request(5, gpus=1)) == ("b",) * 4 + ("a",)
    assert plan(nodes, request(7, gpus=1)) == ("b",) * 4 + ("c",) * 3


def test_fractions_fill_up_gpus_in_use_first() -> None:
    nodes = [node("a", gpus=(1.0, 1.0)), node("b", gpus=(0.5, 0.0))]
    assert plan(nodes, request(gpus=0.5)) == ("b",)
    assert plan(nodes, request(3, gpus=0.5)) == ("a",) * 3


def test_actors_without_gpus_leave_nodes_with_gpus_alone() -> None:
    nodes = [node("gpus", cpus=2, gpus=(1.0,)), node("plain", cpus=16)]
    assert plan(nodes, request(cpus=1)) == ("plain",)
    assert plan(nodes[:1], request(cpus=1)) == ("gpus",)


def test_actors_that_need_nothing_go_where_the_fewest_per_cpu_are() -> None:
    nodes = [node("busy", actors=9), node("idle", actors=1)]
    assert plan(nodes, request()) == ("idle",)
    assert plan(nodes, request(10)).count("idle") == 9


# Spreading.


def test_spread_actors_go_to_the_emptiest_node() -> None:
    nodes = [gpu_node("half", 2), gpu_node("empty", 4), gpu_node("full", 0)]
    assert plan(nodes, request(gpus=1, spread=True)) == ("empty",)
    assert plan(nodes, request(3, gpus=1, spread=True)) == ("empty", "half", "empty")


def test_spread_actors_that_need_nothing_are_even() -> None:
    nodes = [node(name) for name in "abc"]
    assert plan(nodes, request(6, spread=True)) == tuple("abcabc")


# Meshes.


def test_the_slices_of_a_mesh_are_on_nodes_of_their_own_the_fullest_first() -> None:
    nodes = [gpu_node("a", 4), gpu_node("b", 2), gpu_node("c", 3), gpu_node("d", 1)]
    mesh = request(2, gpus=2, own_nodes=True, label="mesh 2 x 2")
    assert plan(nodes, mesh) == ("b", "c")
    assert plan(nodes, request(2, gpus=2, own_nodes=True, spread=True)) == ("a", "c")
    assert reason(nodes, request(4, gpus=2, own_nodes=True, label="mesh 4 x 2")) == (
        "mesh 4 x 2 needs 4 nodes with gpus=2 each, but only 3 nodes have that: a: room for 1; b: room for 1; "
        "c: room for 1; no more room on the other 1"
    )


# Constraints.


def test_a_node_is_named() -> None:
    nodes = [gpu_node("a", 4), gpu_node("b", 0)]
    assert plan(nodes, request(node="a", gpus=1)) == ("a",)
    assert reason(nodes, request(node="b", gpus=1)) == (
        "Model needs gpus=1 and the node 'b', but no node has that: b: 0 whole gpus free of 4"
    )
    assert reason(nodes, request(node="mars")) == "Model cannot be placed: there is no node 'mars'; there is a and b"


def test_labels_have_to_match() -> None:
    nodes = [node("a", {"zone": "x"}), node("b", {"zone": "y", "disk": "ssd"}), node("c")]
    assert plan(nodes, request(labels={"zone": "y"})) == ("b",)
    assert plan(nodes, request(labels={"zone": "y", "disk": "ssd"})) == ("b",)
    assert reason(nodes, request(labels={"zone": "z"})) == (
        "Model needs labels={'zone': 'z'}, but no node has that: a: zone='x'; b: zone='y'; c: no label 'zone'"
    )


def test_actors_are_near_to_or_apart_from_others() -> None:
    nodes = [node(name) for name in "abc"]
    trainer, replica = Anchor("Trainer", "b"), Anchor("Replica", "a")
    assert plan(nodes, request(near=(trainer,))) == ("b",)
    assert plan(nodes, request(2, near=(trainer, replica), apart_from=(trainer,))) == ("a", "a")
    assert plan(nodes, request(2, apart_from=(trainer, replica))) == ("c", "c")
    assert reason(nodes, request(near=(trainer,), apart_from=(trainer,))) == (
        "Model needs a node near Trainer (on b) and a node apart from Trainer (on b), but "
        "no node has that: a and c: not near Trainer (on b); b: Trainer there"
    )


# Refusals.


def test_a_refusal_of_a_gang_says_for_how_many_there_is_room() -> None:
    nodes = [gpu_node("a", 2), gpu_node("b", 0), node("c")]
    assert reason(nodes, request(5, gpus=1, label="Model-1")) == (
        "each of the 5 actors Model-1 needs gpus=1, but there is room for 2: a: room for 2; "
        "b: 0 whole gpus free of 4; c: 0 whole gpus free of 0"
    )


def test_a_refusal_names_the_resource_that_is_missing() -> None:
    nodes = [node("a", cpus=1, gpus=(1.0,), disk=1.0), node("b", gpus=(0.25, 0.5), disk=4.0)]
    assert reason(nodes, request(cpus=2, gpus=1)) == (
        "Model needs cpus=2 and gpus=1, but no node has that: a: 1 cpus free of 16; b: 0 whole gpus free of 2"
    )
    assert "b: no more than 0.5 of any of its 2 GPUs free" in reason(nodes, request(gpus=0.75, cpus=2))
    assert "a: 1 disk free of 4" in reason(nodes[:1], request(custom={"disk": 2}))
    assert "a: 0 tape free of 0" in reason(nodes[:1], request(custom={"tape": 2}))


def test_a_refusal_by_a_thousand_nodes_is_short() -> None:
    nodes = [gpu_node(f"n{index}", index % 3) for index in range(1000)]
    nodes += [node(f"m{index}", {"zone": "x"}) for index in range(1000)]
    text = reason(nodes, request(gpus=4, labels={"zone": "x"}))
    assert "n0, n1, n2 and 997 more: no label 'zone'" in text
    assert "m0: 0 whole gpus free of 0; " in text
    assert "no more room on the other 997" in text
    assert len(text) < 400


def test_without_nodes_the_refusal_says_so() -> None:
    assert reason([], request()) == "Model cannot be placed: there is no node"


@pytest.mark.parametrize(("free", "gpus", "never"), [(1, 2, False), (4, 5, True)])
def test_a_refusal_says_whether_waiting_could_help(free: int, gpus: int, never: bool) -> None:
    found = plan([gpu_node("a", free)], request(gpus=gpus))
    assert isinstance(found, Unplaceable)
    assert found.never is never


# Any nodes, any request.

_shares = st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 1.0])
_names = st.sampled_from(["a", "b", "c"])
_labels = st.dictionaries(st.sampled_from(["zone", "disk"]), st.sampled_from(["x", "y"]), max_size=2)
_anchors = st.lists(st.builds(Anchor, st.just("Other"), _names), max_size=2).map(tuple)
_nodes = st.lists(
    st.builds(
        lambda labels, actors, cpus, gpus, disk: NodeView(
            "", labels, stock(cpus=cpus, gpus=tuple(gpus), disk=disk), actors
        ),
        _labels,
        st.integers(0, 3),
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
        st.lists(_shares, max_size=3),
        st.sampled_from([0.0, 1.0, 2.0]),
    ),
    max_size=3,
).map(lambda views: [view._replace(name=name) for view, name in zip(views, "abc", strict=False)])
_demands = st.builds(
    Demand,
    cpus=st.sampled_from([0, 0.5, 1]),
    gpus=st.sampled_from([0, 0.25, 1 / 3, 0.5, 2 / 3, 1, 2]),
    custom=st.sampled_from([{}, {"disk": 1}]),
)
_requests = st.builds(
    Request,
    st.just("Model"),
    _demands,
    st.integers(1, 4),
    st.builds(Where, st.none() | _names, st.just({}) | _labels, st.just(()) | _anchors, st.just(()) | _anchors),
    st.booleans(),
    st.booleans(),
)


def allows(view: NodeView, where: Where) -> bool:
    return (
        where.node in {None, view.name}
        and where.labels.items() <= view.labels.items()
        and (not where.near or view.name in {anchor.node for anchor in where.near})
        and view.name not in {anchor.node for anchor in where.apart_from}
    )


def ways(left: Stock, demand: Demand) -> Iterator[Stock]:
    """The rest of a node's stock after one more actor, for every choice of GPUs."""
    free = {"cpus": demand.cpus, **demand.custom}
    after = {name: left.free.get(name, 0.0) - free.get(name, 0.0) for name in left.free.keys() | free.keys()}
    if min(after.values()) < -1e-6:
        return
    share = min(1.0, demand.gpus)
    for chosen in combinations(range(len(left.gpus)), -(-int(demand.gpus * 12) // 12)):
        gpus = tuple(has - share * (index in chosen) for index, has in enumerate(left.gpus))
        if min(gpus, default=0.0) > -1e-6:
            yield Stock(left.totals, after, gpus)


def can_be_placed(views: list[tuple[NodeView, int]], wish: Request, count: int) -> bool:
    """Whether any assignment of the members to nodes and GPUs exists, by trying all; with the members on each node."""
    if not count:
        return True
    return any(
        can_be_placed([*views[:at], (view._replace(stock=after), mine + 1), *views[at + 1 :]], wish, count - 1)
        for at, (view, mine) in enumerate(views)
        if allows(view, wish.where) and not (mine and wish.own_nodes)
        for after in ways(view.stock, wish.demand)
    )


@settings(deadline=None, derandomize=True, database=None, max_examples=400)
@given(_nodes, _requests)
def test_a_plan_meets_every_constraint_and_a_refusal_is_true(nodes: list[NodeView], wish: Request) -> None:
    found = plan(nodes, wish)
    possible = can_be_placed([(view, 0) for view in nodes], wish, wish.count)
    event(f"possible: {possible}")
    assert isinstance(found, tuple) or found.never <= (not possible)
    if isinstance(found, Unplaceable):
        assert not possible
        return
    assert possible
    assert len(found) == wish.count
    assert found == plan(nodes, wish)
    chosen = {view.name: view for view in nodes if view.name in found}
    assert set(found) == chosen.keys()
    assert all(allows(view, wish.where) for view in chosen.values())
    for name, view in chosen.items():
        assert found.count(name) <= (1 if wish.own_nodes else wish.room_on(view.stock))
    if not (wish.spread or wish.own_nodes or wish.demand == Demand()):
        rooms = sorted((wish.room_on(view.stock) for view in nodes if allows(view, wish.where)), reverse=True)
        fewest = next(count for count in range(len(rooms) + 1) if sum(rooms[:count]) >= wish.count)
        assert len(chosen) == fewest


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(_demands, max_size=6), _demands, st.integers(1, 6))
def test_a_node_can_reserve_what_is_planned_by_its_true_state(before: list[Demand], demand: Demand, count: int) -> None:
    truth: Resources[object] = Resources(cpus=4, gpus=3, custom={"disk": 3})
    for number, taken in enumerate(before):
        with suppress(InsufficientResources):
            truth.take(number, "other", taken)
    found = plan([NodeView("a", {}, truth.stock())], Request("Model", demand, count))
    members = 0
    try:
        for rank in range(count):
            truth.take(("member", rank), "member", demand)
            members += 1
    except InsufficientResources:
        assert isinstance(found, Unplaceable)
    assert (members == count) is (not isinstance(found, Unplaceable))
