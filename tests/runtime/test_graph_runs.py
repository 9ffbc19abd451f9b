"""Runs of graphs without processes: the messages of their owner and the participants, and their kept values."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from neighbours import Neighbour, close
from rooms import ELSEWHERE, HERE, THERE, turns

import aiodaft
from aiodaft import Actor, method
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import FAILED_VALUE
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.graphs.graph_value import GraphValue, value_of
from aiodaft._runtime.process import closed, opened
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, DeadlineExceeded, PeerLost
from aiodaft.ref import Ref

# Takes longer to encode than the loop may be kept.
LARGE = bytes(2 << 20)


class Word:
    """Can be referred to weakly."""


class Desk(Actor):
    """Steps of graphs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.words: list[weakref.ref[Word]] = []
        self.gate = asyncio.Event()

    @method
    async def note(self, word: Any) -> Any:
        self.seen.append(word)
        return word

    @method
    async def wait(self, word: Any) -> Any:
        self.seen.append(word)
        await self.gate.wait()
        return word

    @method
    async def weigh(self, word: Word) -> int:
        """Remembers its arguments, and does not keep them."""
        self.words.append(weakref.ref(word))
        return 1

    @method
    async def stay(self, word: Any) -> Any:
        """Does not let itself be cancelled."""
        while not self.gate.is_set():
            with suppress(asyncio.CancelledError):
                await self.gate.wait()
        return word

    @method
    async def listed(self, word: Any) -> list[Any]:
        return [word]

    @method
    async def fail(self, word: Any) -> Any:
        raise ValueError(word)


class Site(NamedTuple):
    """An owner of graphs, and two processes with an actor each."""

    owner: Neighbour
    near: Neighbour
    far: Neighbour
    a: Any
    b: Any

    @property
    def actors(self) -> list[Desk]:
        return [hosted.instance for host in (self.near, self.far) for hosted in host.host.actors.values()]

    def hosted(self, index: int) -> HostedActor:
        return [hosted for host in (self.near, self.far) for hosted in host.host.actors.values()][index]

    def sent(self) -> list[tuple[str, int]]:
        """The messages of the owner since the last time."""
        sent, self.owner.sent[:] = [*self.owner.sent], []
        return [(remote, kind) for remote, kind in sent]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made: dict[Any, Neighbour] = {}
    owner, near, far = (Neighbour(name, made) for name in (HERE, THERE, ELSEWHERE))
    handles = [owner.handle(host, host.host_actor(Desk())) for host in (near, far)]
    opened(owner.process, lambda: None)
    yield Site(owner, near, far, *handles)
    closed(owner.process)
    await close([owner, near, far])
    assert owner.errors == []


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    yield
    gc.collect()


async def error_of(ref: Ref[Any]) -> DaftError:
    with pytest.raises(DaftError) as caught:
        await ref
    return caught.value


def left(site: Site) -> tuple[int, ...]:
    """The plans in the three processes, and the runs under way."""
    parts = [*site.near.graphs.participants.values(), *site.far.graphs.participants.values()]
    return len(site.owner.graphs.own), len(parts), sum(len(part.runs) for part in parts)


# A run from its start to its end.


async def test_a_run_is_one_message_to_each_process_and_the_process_of_the_first_step_is_told_first(
    site: Site,
) -> None:
    async with aiodaft.compile(lambda x: site.a.note(site.b.note(x))) as graph:
        assert await graph("x") == "x"
        assert site.sent() == [(ELSEWHERE, m.RUN), (THERE, m.RUN)]
        assert site.far.sent == [(THERE, m.FLOW)]
        assert site.near.sent == [(HERE, m.REPORT)]
    await turns()
    assert left(site) == (0, 0, 0)


async def test_a_value_that_comes_before_the_message_of_the_owner_is_kept(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.b.note(site.a.listed(x))) as graph:
        site.owner.to(ELSEWHERE).hold()
        ref = graph("x")
        await turns(8)
        assert left(site) == (1, 2, 1)
        assert not ref.done()
        site.owner.to(ELSEWHERE).let_go()
        assert await ref == ["x"]


async def test_runs_that_wait_begin_one_after_the_other(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.wait(x), max_in_flight=2) as graph:
        refs = [graph(index) for index in range(5)]
        await turns()
        assert site.actors[0].seen == [0, 1]
        site.actors[0].gate.set()
        assert await asyncio.gather(*refs) == [0, 1, 2, 3, 4]
        assert site.actors[0].seen == [0, 1, 2, 3, 4]


async def test_a_large_input_is_copied_before_its_run_and_the_next_run_waits(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.note(x)) as graph:
        large, small = graph(LARGE), graph("small")
        await turns()
        assert site.sent() == []
        large.cancel()
        error = await error_of(large)
        assert (type(error), error.executed) == (CallCancelled, False)
        assert await small == "small"
        while site.owner.helper.jobs:
            site.owner.helper.turn()
            await turns(8)
    assert site.actors[0].seen == ["small"]


async def test_a_graph_waits_for_its_runs_when_it_is_closed(site: Site) -> None:
    graph = aiodaft.compile(lambda x: site.a.wait(x))
    ref = graph("x")
    await turns(8)
    closing = asyncio.get_running_loop().create_task(graph.aclose())
    await turns()
    assert not closing.done()
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="the graph is closed"):
        graph("y")
    site.actors[0].gate.set()
    await closing
    await turns()
    assert ref.done()
    assert left(site) == (0, 0, 0)


async def test_runs_under_way_go_on_with_the_actor_that_is_replaced(site: Site) -> None:
    fresh = site.far.host_actor(Desk())
    async with aiodaft.compile(lambda x: site.a.wait(x)) as graph:
        old = graph("old")
        await turns(8)
        replacing = asyncio.get_running_loop().create_task(graph.replace(site.a, site.owner.handle(site.far, fresh)))
        await turns(8)
        fresh.instance.gate.set()
        assert await graph("new") == "new"
        assert not replacing.done()
        site.actors[0].gate.set()
        await replacing
        assert await old == "old"
        assert left(site) == (1, 1, 0)
    await turns()
    assert left(site) == (0, 0, 0)


async def test_a_close_that_is_cancelled_cancels_the_runs_and_frees_the_plans_after_them(site: Site) -> None:
    graph = aiodaft.compile(lambda x: site.a.wait(x))
    ref = graph("x")
    await turns(8)
    closing = asyncio.get_running_loop().create_task(graph.aclose())
    await turns()
    closing.cancel()
    assert isinstance(await error_of(ref), CallCancelled)
    await turns(8)
    assert closing.cancelled()
    assert left(site) == (0, 0, 0)


# Failures.


async def test_an_error_goes_the_way_of_the_value_and_the_steps_that_need_it_do_not_run(site: Site) -> None:
    async with aiodaft.compile(lambda x: [site.b.note(site.a.fail(x)), site.a.note(x)]) as graph:
        first, second = graph("x")
        with pytest.raises(ValueError, match="x") as caught:
            await first
        assert "needed by Desk.note of" in caught.value.__notes__[-1]
        assert await second == "x"
        assert (site.actors[0].seen, site.actors[1].seen) == (["x"], [])


async def test_a_process_that_ends_fails_what_it_has_not_reported_and_later_runs(site: Site) -> None:
    async with aiodaft.compile(lambda x: [site.b.wait(x), site.a.note(x)]) as graph:
        lost, other = graph("x")
        assert await other == "x"
        site.owner.lose(ELSEWHERE)
        site.near.lose(ELSEWHERE)
        assert isinstance(await error_of(lost), PeerLost)
        again, other = graph("y")
        error = await error_of(again)
        assert (type(error), error.executed) == (PeerLost, False)
        assert await other == "y"


async def test_only_runs_under_way_may_have_run_in_a_process_that_ends(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.wait(x), max_in_flight=1) as graph:
        under_way, *waiting = graph("x"), graph("y"), graph("z")
        await turns(8)
        site.owner.lose(THERE)
        assert (await error_of(under_way)).executed is None
        assert [(await error_of(ref)).executed for ref in waiting] == [False, False]


async def test_a_participant_fails_the_values_of_a_process_that_was_lost_before_the_run(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.note(site.b.note(x))) as graph:
        # Only this participant has noticed.
        site.near.lose(ELSEWHERE)
        assert isinstance(await error_of(graph("x")), PeerLost)
    assert site.actors[0].seen == []


async def test_runs_of_a_graph_that_no_process_could_install_fail_in_their_turn(site: Site) -> None:
    site.hosted(0).find_spec = lambda name: None
    graph = aiodaft.compile(lambda x: site.a.note(x))
    for ref in (graph("x"), graph("y")):
        with pytest.raises(AttributeError, match="has no remote method 'note'"):
            await ref
    await graph.aclose()
    assert site.sent() == []


async def test_a_graph_that_is_closed_leaves_a_participant_with_the_process_that_the_participant_waits_for(
    site: Site,
) -> None:
    graph = aiodaft.compile(lambda x: site.a.note(site.b.wait(x)))
    ref = graph("x")
    await turns(8)
    # The step goes on: its process does not hear of the cancellation.
    site.owner.to(ELSEWHERE).hold()
    ref.cancel()
    assert isinstance(await error_of(ref), CallCancelled)
    await graph.aclose()
    await turns()
    assert left(site) == (0, 2, 2)
    site.near.lose(ELSEWHERE)
    assert left(site) == (0, 1, 1)


async def test_a_participant_ends_its_runs_with_the_owner(site: Site) -> None:
    graph = aiodaft.compile(lambda x: site.a.wait(x))
    ref = graph("x")
    await turns(8)
    assert site.actors[0].seen == ["x"]
    site.near.lose(HERE)
    await turns(8)
    assert site.near.graphs.participants == {}
    assert not site.hosted(0).running
    site.owner.lose(THERE)
    assert isinstance(await error_of(ref), PeerLost)
    await graph.aclose()


# A chain that comes back to an actor: one call of the actor, which waits between its steps.


def there_and_back(site: Site, first: str = "note") -> Any:
    """The first actor, the second one, and the first one again."""
    return aiodaft.compile(lambda x: site.a.listed(site.b.wait(getattr(site.a, first)(x))))


async def test_the_steps_of_an_actor_that_wait_for_each_other_are_one_call(site: Site) -> None:
    a, b = (site.hosted(index) for index in range(2))
    async with there_and_back(site) as graph:
        site.actors[1].gate.set()
        assert [await graph("x"), await graph("y")] == [["x"], ["y"]]
        assert (a.done, b.done) == (2, 2)
        # A step that fails does not end the call; the steps that need its result do not run.
        site.actors[1].gate.clear()
        async with there_and_back(site, "fail") as failing:
            with pytest.raises(ValueError, match="z") as caught:
                await failing("z")
    assert "needed by Desk.listed of" in caught.value.__notes__[-1]
    assert (a.done, b.done, site.actors[1].seen) == (3, 3, ["x", "y"])


async def test_what_is_behind_such_a_run_waits_for_its_last_step(site: Site) -> None:
    a, b = site.a, site.b
    async with (
        aiodaft.compile(lambda x: a.note(b.wait(a.note(x)))) as graph,
        aiodaft.compile(lambda x: a.note(x)) as one,
    ):
        ref, behind = graph("x"), one("behind")
        await turns(8)
        assert site.actors[0].seen == ["x"]
        site.actors[1].gate.set()
        assert [await ref, await behind] == ["x", "behind"]
    assert site.actors[0].seen == ["x", "x", "behind"]


async def test_a_step_that_was_given_up_and_goes_on_holds_up_no_later_run(site: Site) -> None:
    a, b = site.a, site.b
    async with (
        aiodaft.compile(lambda x: a.note(b.note(a.stay(x)))) as graph,
        aiodaft.compile(lambda x: a.note(x)) as one,
    ):
        ref, behind = graph("x"), one("behind")
        await turns(8)
        assert site.actors[0].seen == []
        ref.cancel()
        assert await behind == "behind"
        site.actors[0].gate.set()
        with pytest.raises(CallCancelled):
            await ref


async def test_the_argument_of_a_step_is_freed_while_the_next_one_waits(site: Site) -> None:
    a, b = site.a, site.b
    async with aiodaft.compile(lambda x: a.note(b.wait(a.weigh(x)))) as graph:
        result = graph(Word())
        await turns(8)
        assert site.actors[1].seen == [1]
        gc.collect()
        assert [word() for word in site.actors[0].words] == [None]
        site.actors[1].gate.set()
        assert await result == 1


@pytest.mark.parametrize("how", ["cancelled", "late", "the actor is stopped", "the other process is lost"])
async def test_a_step_that_waits_between_two_others_ends_without_having_run(site: Site, how: str) -> None:
    a = site.hosted(0)
    async with there_and_back(site) as graph:
        if how == "late":
            async with aiodaft.deadline(0.3):
                ref = graph("x")
        else:
            ref = graph("x")
        await turns(8)
        assert (len(a.running), site.actors[0].seen, site.actors[1].seen) == (1, ["x"], ["x"])
        if how == "cancelled":
            site.owner.to(ELSEWHERE).hold()
            ref.cancel()
        elif how == "the actor is stopped":
            await a.stop("the test says so", 0)
        elif how == "the other process is lost":
            site.near.lose(ELSEWHERE)
        error = await error_of(ref)
        kinds = {"cancelled": CallCancelled, "late": DeadlineExceeded, "the actor is stopped": ActorDied}
        assert (type(error), error.executed) == (kinds.get(how, PeerLost), False)
        assert not a.running
        site.owner.to(ELSEWHERE).let_go()
        site.actors[1].gate.set()
    await turns(8)


# Cancellation.


async def test_a_run_is_skipped_with_its_last_wanted_result_and_only_once(site: Site) -> None:
    async with aiodaft.compile(lambda x: [site.a.wait(x), site.b.wait(x)]) as graph:
        first, second = graph("x")
        await turns(8)
        site.sent()
        first.cancel()
        error = await error_of(first)
        assert "its run goes on" in str(error)
        assert site.sent() == []
        second.cancel()
        second.cancel()
        assert isinstance(await error_of(second), CallCancelled)
        assert site.sent() == [(THERE, m.SKIP), (ELSEWHERE, m.SKIP)]
    assert left(site)[2] == 0


async def test_a_run_that_waits_is_cancelled_without_a_message(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.wait(x), max_in_flight=1) as graph:
        first, second, third = graph("x"), graph("y"), graph("z")
        await turns(8)
        site.sent()
        second.cancel()
        assert (await error_of(second)).executed is False
        site.actors[0].gate.set()
        assert [await first, await third] == ["x", "z"]
        assert site.sent() == [(THERE, m.RUN)]
    assert site.actors[0].seen == ["x", "z"]


async def test_the_runtime_closes_while_runs_wait(site: Site) -> None:
    graph = aiodaft.compile(lambda x: site.a.wait(x), max_in_flight=1)
    first, second = graph("x"), graph("y")
    await turns(8)
    site.owner.graphs.abandon(aiodaft.exceptions.RuntimeClosed("the test is over"))
    assert (await error_of(second)).executed is False
    site.actors[0].gate.set()
    assert await first == "x"
    await graph.aclose()


async def test_the_runtime_closes_before_a_graph_is_ready(site: Site) -> None:
    graph = aiodaft.compile(lambda x: site.a.wait(x))
    refs = [graph("x"), graph(LARGE), graph("y"), graph("z")]
    site.owner.graphs.abandon(aiodaft.exceptions.RuntimeClosed("the test is over"))
    assert [(await error_of(ref)).executed for ref in refs] == [False] * 4
    await graph.aclose()
    assert left(site) == (0, 0, 0)


async def test_each_step_that_needs_a_failed_value_gets_an_exception_of_its_own() -> None:
    failed = GraphValue.of_error(ValueError("no"), executed=True)
    item = (7, failed.failure, failed.executed)
    assert len(item) == FAILED_VALUE
    value = value_of(item)
    assert value is not None
    first, second = (value.error_for(label, "Node.make of Node-1") for label in ("a step", "another step"))
    assert first is not second
    assert first.__notes__[-1].startswith("needed by a step, which did not run")
    assert second.__notes__[-1].startswith("needed by another step")


async def test_a_process_does_not_wait_for_one_that_alone_has_lost_the_connection_between_them(site: Site) -> None:
    async with aiodaft.compile(lambda x: site.a.note(site.b.wait(x))) as graph:
        run = graph("x")
        while not site.actors[1].seen:
            await asyncio.sleep(0)
        # The other end may be a newer connection, of which nothing is lost.
        site.far.to(THERE).lost = reset = PeerLost("it was reset")
        site.far.graphs.connection_lost(THERE, reset)
        assert type(await error_of(run)) is PeerLost
        # Also a run that begins there later fails.
        (part,) = site.near.graphs.participants.values()
        assert part.run(2).values
        part.forget(part.run(2))
        site.actors[1].gate.set()
    await turns()
    assert left(site) == (0, 0, 0)
