"""The owner's side of placement, against several nodes that are only ledgers: plans, refusals, undoing, waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from aiodaft._protocol.node.resources import Demand, Resources, Wish
from aiodaft._protocol.placement import NodeState, NodeView, Request, Where
from aiodaft._runtime.node.nodes import Site
from aiodaft._runtime.placing import FixedSites, Order, Placing, Waiting
from aiodaft.exceptions import InsufficientResources, PeerLost, RuntimeClosed
from aiodaft.testing import AutojumpLoop

T = TypeVar("T")


class Ledger:
    """A node: its resources, and the requests to it."""

    def __init__(self, name: str, gpus: int = 4, labels: dict[str, str] | None = None) -> None:
        self.name, self.labels = name, labels or {}
        self.resources: Resources[str] = Resources(cpus=8, gpus=gpus)
        self.views = 0
        # The errors that answer the next requests in place of an attempt.
        self.errors: list[BaseException] = []
        self.lost = False
        self._freed = asyncio.Event()

    async def state(self, within: Any) -> NodeState:
        self.views += 1
        await asyncio.sleep(0)
        self._check()
        return NodeState(self.resources.stock(within), len(self.resources), self.resources.revision)

    async def changed(self, revision: int) -> None:
        while self.resources.revision == revision:
            self._check()
            await self._freed.wait()

    def reserve(self, wishes: Sequence[Wish[str]], within: Any) -> None:
        self._check()
        if self.errors:
            raise self.errors.pop(0)
        self.resources.take_all(wishes, within)

    def release(self, holders: Sequence[str]) -> None:
        for holder in holders:
            self.resources.give_back(holder)
        self.wake()

    def wake(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def lose(self) -> None:
        """The node is gone."""
        self.lost = True
        self.wake()

    def _check(self) -> None:
        if self.lost:
            raise PeerLost(f"{self.name} is gone")

    @property
    def free(self) -> float:
        return self.resources.free()["gpus"]


def site_of(node: Ledger, within: Any = None) -> Site:
    agent: Any = node
    return Site(node.name, node.labels, agent, within)


class Cluster:
    """Nodes that come and go."""

    def __init__(self, *nodes: Ledger, grows: bool = False) -> None:
        self.nodes = list(nodes)
        self._grows = grows
        self._joined = asyncio.Event()

    def known(self) -> list[Site]:
        return [site_of(node) for node in self.nodes]

    def differ(self, known: Sequence[Site]) -> Coroutine[Any, Any, None] | None:
        return self._wait(known) if self._grows else None

    async def _wait(self, known: Sequence[Site]) -> None:
        while self.known() == known:
            await self._joined.wait()

    def join(self, node: Ledger) -> None:
        self.nodes.append(node)
        self._joined.set()


def started(coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coro, name=name)


class Owner:
    """Places actors of one GPU, which are called after it."""

    def __init__(self, cluster: Cluster | FixedSites, name: str = "owner") -> None:
        self.cluster: Any = cluster
        self.name = name
        self.placing = Placing(started)
        # The turns of the loop that a request takes.
        self.delay = 0
        self._count = 0

    async def place(
        self, count: int = 1, *, wait: float | None = None, over: asyncio.Event | None = None, **options: Any
    ) -> list[str]:
        """The node of each of these actors."""
        gpus = options.pop("gpus", 1)
        request = Request("Model", Demand(gpus=gpus), count, **options)
        self._count += 1
        wishes = [Wish(f"{self.name}-{self._count}-{rank}", f"Model[{rank}]", request.demand) for rank in range(count)]

        async def attempt(site: Any, ranks: Sequence[int]) -> list[str]:
            for _ in range(self.delay):
                await asyncio.sleep(0)
            site.agent.reserve([wishes[rank] for rank in ranks], site.within)
            await asyncio.sleep(0)
            return [wishes[rank].holder for rank in ranks]

        def undo(site: Any, ranks: Sequence[int]) -> None:
            site.agent.release([wishes[rank].holder for rank in ranks])

        waiting = None if wait is None else Waiting(wait, over or asyncio.Event())
        placed = await self.placing.place(Order(request, self.cluster, attempt, undo), waiting)
        assert [holder for _, holder in placed] == [wish.holder for wish in wishes]
        return [site.name for site, _ in placed]


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        return runner.run(main)


# Planning.


async def test_the_only_node_decides_without_being_looked_at() -> None:
    node = Ledger("a", gpus=2)
    owner = Owner(Cluster(node))
    assert await owner.place(2) == ["a", "a"]
    with pytest.raises(InsufficientResources, match=r"^Model\[0\] needs gpus=1, but this node has 2, of which 0 free"):
        await owner.place()
    assert node.views == 0


async def test_nodes_that_no_constraint_allows_are_not_asked() -> None:
    a, b = Ledger("a", labels={"zone": "x"}), Ledger("b")
    owner = Owner(Cluster(a, b))
    assert await owner.place(where=Where(labels={"zone": "x"})) == ["a"]
    with pytest.raises(InsufficientResources, match="no node has that: a: zone='x'; b: no label 'zone'"):
        await owner.place(where=Where(labels={"zone": "y"}))
    assert (a.views, b.views) == (0, 0)


async def test_views_are_kept_and_follow_the_own_plans() -> None:
    a, b = Ledger("a", gpus=2), Ledger("b", gpus=4)
    owner = Owner(Cluster(a, b))
    placed = [(await owner.place())[0] for _ in range(6)]
    assert placed == ["a", "a", "b", "b", "b", "b"]
    assert (a.views, b.views) == (1, 1)
    a.release(["owner-1-0"])
    owner.placing.forget("a")
    assert await owner.place() == ["a"]
    assert (a.views, b.views) == (2, 1)


async def test_placements_side_by_side_take_account_of_each_other() -> None:
    nodes = [Ledger(name) for name in "abc"]
    owner = Owner(Cluster(*nodes))
    owner.delay = 5
    placed = await asyncio.gather(*(owner.place(spread=True) for _ in range(9)))
    assert sorted(name for [name] in placed) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert [node.views for node in nodes] == [1, 1, 1]


async def test_a_view_that_was_told_needs_no_question() -> None:
    a, b = Ledger("a"), Ledger("b")
    owner = Owner(Cluster(a, b))
    for node in (a, b):
        owner.placing.learn(NodeView(node.name, {}, node.resources.stock()))
    assert await owner.place(4) == ["a"] * 4
    assert (a.views, b.views) == (0, 0)


# Old views.


async def test_an_old_view_leads_to_a_refusal_and_another_plan() -> None:
    a, b = Ledger("a", gpus=1), Ledger("b", gpus=2)
    owner, other = Owner(Cluster(a, b)), Owner(Cluster(a, b), "other")
    assert await owner.place(gpus=0.5) == ["a"]
    assert await other.place(gpus=0.5) == ["a"]
    # The owner believes in room on a.
    assert await owner.place(gpus=0.5) == ["b"]


async def test_an_old_view_without_room_is_no_reason_to_refuse() -> None:
    a, b = Ledger("a", gpus=1), Ledger("b", gpus=1)
    owner = Owner(Cluster(a, b))
    assert await owner.place(2) == ["a", "b"]
    b.release(["owner-1-1"])
    assert await owner.place() == ["b"]
    with pytest.raises(InsufficientResources, match="no node has that: a: 0 whole gpus free of 1; b: 0 whole gpus"):
        await owner.place()


async def test_a_gang_is_undone_where_it_was_reserved_if_one_node_refuses() -> None:
    a, b, c = Ledger("a", gpus=3), Ledger("b", gpus=3), Ledger("c", gpus=2)
    owner, other = Owner(Cluster(a, b, c)), Owner(Cluster(a, b, c), "other")
    await owner.place(gpus=2)
    await other.place(2, where=Where(node="b"))
    assert await owner.place(4) == ["c", "c", "a", "b"]
    assert (a.free, b.free, c.free) == (0, 0, 0)
    with pytest.raises(InsufficientResources, match="each of the 2 actors Model needs gpus=1, but no node has that"):
        await owner.place(2)


class Silent(Ledger):
    """A node that answers when it goes on."""

    def __init__(self, name: str, gpus: int = 4) -> None:
        super().__init__(name, gpus)
        self.goes_on = asyncio.Event()

    async def state(self, within: Any) -> NodeState:
        await self.goes_on.wait()
        return await super().state(within)


def test_a_silent_node_is_left_out() -> None:
    async def main() -> None:
        owner = Owner(Cluster(Silent("a"), Ledger("b", gpus=1)))
        assert await owner.place() == ["b"]
        with pytest.raises(InsufficientResources, match="b: 0 whole gpus free of 1; a: it is out of reach"):
            await owner.place()

    run(main())


def test_a_silent_node_holds_up_only_what_needs_it() -> None:
    async def main() -> list[float]:
        now, silent = asyncio.get_running_loop().time, Silent("a", gpus=8)
        owner = Owner(Cluster(silent, Ledger("b"), Ledger("c")))
        needs_it = started(owner.place(2, gpus=4, where=Where(node="a")), "needs it")
        may_need_it = started(owner.place(gpus=8), "may need it")
        await asyncio.sleep(0)
        times: list[float] = []
        for _ in range(4):
            before = now()
            assert await owner.place() in (["b"], ["c"])
            times.append(now() - before)
        silent.goes_on.set()
        assert await needs_it == ["a", "a"]
        with pytest.raises(InsufficientResources, match="a: 0 whole gpus free of 8"):
            await may_need_it
        return times

    # It is asked once, and then not waited for.
    assert run(main()) == [0.5, 0, 0, 0]


def test_what_waits_for_resources_gets_those_of_a_node_that_was_silent() -> None:
    async def main() -> list[str]:
        silent = Silent("a", gpus=8)
        placing = started(Owner(Cluster(silent, Ledger("b"), grows=True)).place(gpus=8, wait=100), "waits")
        await asyncio.sleep(5)
        silent.goes_on.set()
        found: list[str] = await placing
        return found

    assert run(main()) == ["a"]


async def test_a_node_that_refuses_for_a_reason_that_no_view_shows_is_left_out() -> None:
    a, b = Ledger("a", gpus=1), Ledger("b", gpus=1)
    owner = Owner(Cluster(a, b))
    a.errors = [InsufficientResources("GPU 0 is in use by pid 7")] * 2
    assert await owner.place() == ["b"]
    with pytest.raises(InsufficientResources) as caught:
        await owner.place()
    assert str(caught.value) == (
        "Model needs gpus=1, but no node has that: b: 0 whole gpus free of 1; a: GPU 0 is in use by pid 7"
    )
    assert a.free == 1


async def test_a_lost_node_is_left_out() -> None:
    a, b = Ledger("a"), Ledger("b")
    owner = Owner(Cluster(a, b))
    assert await owner.place() == ["a"]
    # The owner's view of it is from before.
    a.lost = True
    assert await owner.place() == ["b"]
    with pytest.raises(InsufficientResources, match="b: 3 whole gpus free of 4; a: it is out of reach"):
        await owner.place(gpus=4)
    with pytest.raises(PeerLost, match="a is gone"):
        await owner.place(where=Where(node="a"))


async def test_other_errors_are_raised_and_leave_nothing() -> None:
    a, b = Ledger("a", gpus=1), Ledger("b", gpus=1)
    b.errors = [RuntimeClosed("closed")]
    with pytest.raises(RuntimeClosed):
        await Owner(Cluster(a, b)).place(2)
    assert (a.free, b.free) == (1, 1)


@pytest.mark.parametrize("moment", range(12))
async def test_a_cancelled_gang_leaves_nothing(moment: int) -> None:
    nodes = [Ledger(name, gpus=1) for name in "abc"]
    placing = started(Owner(Cluster(*nodes)).place(3), "gang")
    for _ in range(moment):
        await asyncio.sleep(0)
    placed = placing.done()
    placing.cancel()
    await asyncio.wait([placing])
    assert placed == (not placing.cancelled())
    assert sum(node.free for node in nodes) == (0 if placed else 3)


# Slices.


async def test_slices_are_sites_that_are_looked_at_each_time() -> None:
    a, b = Ledger("a"), Ledger("b")
    for node in (a, b):
        node.resources.carve("slice", "mesh", Demand(gpus=2))
    sites = tuple(site_of(node, "slice") for node in (a, b))
    owner = Owner(FixedSites(sites))
    assert await owner.place(3) == ["a", "a", "b"]
    a.release(["owner-1-0"])
    assert await owner.place(2) == ["a", "b"]
    with pytest.raises(InsufficientResources, match="a: 0 whole gpus free of 2; b: 0 whole gpus free of 2"):
        await owner.place()


async def test_a_mesh_needs_nodes_of_its_own() -> None:
    a, b = Ledger("a"), Ledger("b", gpus=2)
    owner = Owner(Cluster(a, b))
    assert await owner.place(2, gpus=2, own_nodes=True) == ["a", "b"]
    with pytest.raises(InsufficientResources, match="needs 2 nodes with gpus=1 each, but only 1 node has that"):
        await owner.place(2, own_nodes=True)
    with pytest.raises(InsufficientResources, match="needs 2 nodes with gpus=1 .*, but only 1 node has that"):
        await owner.place(2, own_nodes=True, where=Where(node="a"))


# Waiting.


def test_what_waits_goes_on_when_something_is_given_back() -> None:
    async def main() -> None:
        a, b = Ledger("a", gpus=1), Ledger("b", gpus=1)
        owner = Owner(Cluster(a, b))
        await owner.place(2)
        loop = asyncio.get_running_loop()
        loop.call_later(5, b.release, ["owner-1-1"])
        loop.call_later(7, a.release, ["owner-1-0"])
        assert await owner.place(wait=60) == ["b"]
        assert loop.time() == 5
        assert await owner.place(wait=60) == ["a"]
        assert loop.time() == 7

    run(main())


def test_those_that_wait_get_their_turn_in_the_order_in_which_they_began() -> None:
    async def main() -> None:
        node = Ledger("a", gpus=1)
        owner = Owner(Cluster(node))
        await owner.place()
        order: list[int] = []

        async def one(number: int) -> None:
            await owner.place(wait=60)
            order.append(number)
            node.release([f"owner-{number}-0"])

        tasks = [started(one(number), "one") for number in (2, 3, 4)]
        asyncio.get_running_loop().call_later(1, node.release, ["owner-1-0"])
        await asyncio.gather(*tasks)
        assert order == [2, 3, 4]

    run(main())


def test_a_wait_that_is_over_says_how_long_it_was_and_why() -> None:
    async def main() -> None:
        node = Ledger("a", gpus=1)
        owner = Owner(Cluster(node))
        await owner.place()
        with pytest.raises(InsufficientResources, match=r"of which 0 free: Model\[0\] has 1 \(waited 30 s\)$"):
            await owner.place(wait=30)
        assert asyncio.get_running_loop().time() == 30
        with pytest.raises(InsufficientResources, match=r"\(waited 0 s\)$"):
            await owner.place(wait=0)

    run(main())


def test_what_can_never_be_is_an_error_at_once_unless_nodes_may_join() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for where, gpus in ((Where(), 5), (Where(labels={"zone": "x"}), 1)):
            with pytest.raises(InsufficientResources):
                await Owner(Cluster(Ledger("a"), Ledger("b"))).place(gpus=gpus, where=where, wait=60)
        assert loop.time() == 0
        cluster = Cluster(Ledger("a"), grows=True)
        loop.call_later(9, cluster.join, Ledger("big", gpus=8, labels={"zone": "x"}))
        owner = Owner(cluster)
        assert await owner.place(gpus=5, wait=60) == ["big"]
        assert await owner.place(where=Where(labels={"zone": "x"}), wait=60) == ["big"]
        assert loop.time() == 9

    run(main())


def test_the_end_of_the_scope_ends_the_waiting() -> None:
    async def main() -> None:
        over = asyncio.Event()
        owner = Owner(Cluster(Ledger("a", gpus=1), grows=True))
        await owner.place()
        loop = asyncio.get_running_loop()
        loop.call_later(3, over.set)
        with pytest.raises(InsufficientResources):
            await owner.place(wait=60, over=over)
        assert loop.time() == 3

    run(main())


def test_a_node_that_is_lost_while_something_waits_for_it_is_left_out() -> None:
    async def main() -> None:
        a, b = Ledger("a", gpus=1), Ledger("b", gpus=1)
        owner = Owner(Cluster(a, b))
        await owner.place(2)
        loop = asyncio.get_running_loop()
        loop.call_later(2, a.lose)
        with pytest.raises(InsufficientResources, match="b: 0 whole gpus free of 1; a: it is out of reach"):
            await owner.place(2, wait=60)
        assert loop.time() == 2
        loop.call_later(2, b.release, ["owner-1-1"])
        assert await owner.place(wait=60) == ["b"]

    run(main())


# Several owners.


@pytest.mark.parametrize("seed", range(60))
def test_owners_with_old_views_never_overcommit_and_none_waits_for_ever(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        nodes = [Ledger(name, gpus=rng.randint(1, 4)) for name in "abc"]
        total = sum(node.free for node in nodes)
        holders: list[tuple[Ledger, str]] = []

        async def live(owner: Owner) -> None:
            for number in range(1, 9):
                owner.delay = rng.randint(0, 4)
                count, spread = rng.randint(1, 3), rng.random() < 0.5
                try:
                    placed = await owner.place(count, spread=spread, wait=rng.choice([None, 50]))
                except InsufficientResources:
                    continue
                mine = [(node, f"{owner.name}-{number}-{rank}") for rank, name in enumerate(placed)
                        for node in nodes if node.name == name]  # fmt: skip
                holders.extend(mine)
                await asyncio.sleep(rng.random())
                for node, holder in mine:
                    node.release([holder])
                    holders.remove((node, holder))
                    owner.placing.forget(node.name)

        async def look() -> None:
            for _ in range(40):
                assert all(node.free >= 0 for node in nodes)
                assert sum(node.free for node in nodes) + len(holders) <= total
                await asyncio.sleep(0.2)

        await asyncio.gather(look(), *(live(Owner(Cluster(*nodes), f"o{number}")) for number in range(4)))
        assert sum(node.free for node in nodes) == total

    run(main())
