"""Refs: awaitable, passable, and never through the controller (rows CR2, CR3)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from typing import Any, NamedTuple

import anyio
import pytest
from actors import Box, Echo, Log, Relay, Sleeper
from failing import Failing

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_asyncio_takes_refs_as_they_are(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    assert await asyncio.gather(echo.echo(1), echo.echo(2)) == [1, 2]
    assert await asyncio.wait_for(echo.echo(3), 5) == 3
    assert await asyncio.shield(echo.echo(4)) == 4
    assert sorted([await done for done in asyncio.as_completed([echo.echo(5), echo.echo(6)])]) == [5, 6]
    refs = {echo.echo(7), echo.echo(8)}
    done, pending = await asyncio.wait(refs)
    assert done == refs
    assert not pending
    async with asyncio.timeout(30):
        assert await echo.echo(9) == 9
    async with asyncio.TaskGroup() as group:
        task = group.create_task(echo.echo(10).value())
    assert task.result() == 10


async def test_the_result_of_a_done_ref_is_had_without_an_await_if_it_is_here(rt: aiodaft.Runtime) -> None:
    echo, failing = await rt.spawn(Echo), await rt.spawn(Failing)
    small, large, bad = echo.echo([1]), echo.echo(bytes(1_000_000)), failing.raise_value_error()
    with pytest.raises(RuntimeError, match="of Echo.echo of .* would block the event loop .*use `await`"):
        small.result()
    done, _ = await asyncio.wait([small, large, bad])
    assert done == {small, large, bad}
    assert small.result() is small.result() is await small
    with pytest.raises(ValueError, match="bad value"):
        bad.result()
    with pytest.raises(RuntimeError, match=r"value of Echo.echo of Echo-\d+ is not in this process yet: .*use `await`"):
        large.result()
    assert await large is large.result()


async def test_wait_returns_when_the_first_fails(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    slow, bad = failing.wait(), failing.raise_value_error()
    done, pending = await asyncio.wait([slow, bad], return_when=asyncio.FIRST_EXCEPTION)
    assert done == {bad}
    assert pending == {slow}
    assert isinstance(bad.exception(), ValueError)
    slow.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await slow


async def test_state_of_a_ref(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    ref = log.after_gate("x")
    assert not ref.done()
    assert not ref.cancelled()
    with pytest.raises(asyncio.InvalidStateError):
        ref.exception()
    assert "pending" in repr(ref)
    called: list[Any] = []
    ref.add_done_callback(called.append)
    ref.add_done_callback(called.clear)
    assert ref.remove_done_callback(called.clear) == 1
    await log.open_gate()
    await ref.ready()
    assert ref.done()
    assert ref.exception() is None
    assert await ref == "x"
    await asyncio.sleep(0)
    assert called == [ref]
    assert "done" in repr(ref)


async def test_anyio_does_not_take_a_value_away_that_is_there(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    for number in range(20):
        values: list[Any] = []
        with anyio.CancelScope() as scope:
            ref = log.after_gate(number)

            async def watch(ref: aiodaft.Ref[Any] = ref, scope: anyio.CancelScope = scope) -> None:
                await ref
                scope.cancel()

            watching = asyncio.get_running_loop().create_task(watch())
            await asyncio.sleep(0)
            opening = log.open_gate()
            values.append(await ref)
        # As with futures of asyncio: the task behind the watcher goes on with the value, not with the cancellation.
        assert values == [number]
        await watching
        await opening


async def test_one_of_two_awaiters_is_cancelled_and_the_other_gets_the_value(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    ref = log.after_gate("shared")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ref.value())
        second = group.create_task(ref.value())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await log.open_gate()
    assert first.cancelled()
    assert second.result() == "shared"


@pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
async def test_very_many_outstanding_refs_are_small(rt: aiodaft.Runtime, count: int) -> None:
    log = await rt.spawn(Log)
    await log.all()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        refs = [log.after_gate(index) for index in range(count)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(refs) < 2048
    opened = log.open_gate()
    for ref in refs:
        ref.cancel()
    await opened
    for ref in refs:
        await ref.ready()
        ref.exception()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A dataclass with a ref in it."""

    name: str
    value: Any
    more: list[Any] = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    """A named tuple with a ref in it."""

    left: Any
    right: Any


async def test_refs_at_any_depth_are_resolved_and_types_survive(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    one, two = a.echo(1), a.echo({"two": 2})
    value = {"list": [one, (two, one)], "data": Sample("s", one, [{"deep": two}]), "pair": Pair(one, 5)}
    got = await b.echo(value)
    assert got == {
        "list": [1, ({"two": 2}, 1)],
        "data": Sample("s", 1, [{"deep": {"two": 2}}]),
        "pair": Pair(1, 5),
    }
    assert type(got["list"][1]) is tuple
    assert type(got["pair"]) is Pair


async def test_a_ref_inside_another_object_travels_as_a_ref(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    assert await relay.hold(Box(echo.echo("held"))) == "Ref"
    assert await relay.read_held() == "held"


async def test_a_ref_of_another_process_is_waited_for_as_one_of_its_own(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    for value in ("held", bytes(1 << 20)):
        await relay.hold(Box(echo.echo(value)))
        assert await relay.wait_held() == "None"


async def test_a_ref_in_a_result_can_be_awaited_by_the_caller(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    box = await relay.ref_of_other(echo, {"far": "away"})
    assert isinstance(box.ref, aiodaft.Ref)
    assert await box.ref == {"far": "away"}
    assert await echo.echo(box.ref) == {"far": "away"}


async def test_a_ref_of_a_value_that_is_here_is_passed_on(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    ref = a.echo([1, 2])
    here = await ref
    here.append("changed here, not there")
    assert await b.echo(ref) == [1, 2]


async def test_put_gives_a_ref_for_many(rt: aiodaft.Runtime) -> None:
    actors = [await rt.spawn(Echo) for _ in range(3)]
    for value in ({"config": 1}, bytes(300_000)):
        ref = rt.put(value)
        assert await ref is value
        assert await asyncio.gather(*(actor.echo(ref) for actor in actors)) == [value] * 3


async def test_a_chain_is_submitted_before_anything_runs(rt: aiodaft.Runtime) -> None:
    log, echo = await rt.spawn(Log), await rt.spawn(Echo)
    last: Any = log.after_gate("value")
    for _ in range(20):
        last = echo.echo(last)
    assert not last.done()
    await log.open_gate()
    assert await last == "value"


async def messages_of(rt: aiodaft.Runtime, work: Callable[[], Awaitable[object]]) -> tuple[int, int]:
    """The messages that the controller sends and receives for some work; other messages may come in between."""
    counts: list[tuple[int, int]] = []
    for _ in range(10):
        before = rt.traffic()
        await work()
        after = rt.traffic()
        sent, received = after.messages_sent - before.messages_sent, after.messages_received - before.messages_received
        counts.append((sent, received))
    return min(counts)


@pytest.mark.parametrize("name", ["echo", "echo_on_thread"])
async def test_refs_among_plain_arguments_cost_one_message_each_at_most(rt: aiodaft.Runtime, name: str) -> None:
    a, b, c = [getattr(await rt.spawn(Echo), name) for _ in range(3)]
    # Each actor has to know the next one.
    await c(b(a(0)))

    async def chain() -> None:
        first = a(1)
        second = b(first)
        assert await asyncio.gather(first, second, c(second)) == [1, 1, 1]

    # Three calls, and to two of the actors: send your result to the next one.
    assert await messages_of(rt, chain) == (5, 3)

    async def in_one_process() -> None:
        first = a(2)
        second = a(first)
        assert await asyncio.gather(first, second, a(second)) == [2, 2, 2]

    assert await messages_of(rt, in_one_process) == (3, 3)
    three = a(3)
    await three

    async def known() -> None:
        assert await b(three) == 3

    assert await messages_of(rt, known) == (1, 1)

    async def fan_out() -> None:
        four = a(4)
        assert await asyncio.gather(four, b(four), c(four), b(four)) == [4, 4, 4, 4]

    assert await messages_of(rt, fan_out) == (7, 4)


async def test_a_result_that_is_more_than_plain_is_sent_on_as_well(rt: aiodaft.Runtime) -> None:
    a, b = [await rt.spawn(Echo) for _ in range(2)]
    for value in ([1, 2], {"x": (1, 2)}, bytes(5000), "x" * 200_000):
        assert await b.echo(a.echo(value)) == value
        assert await a.echo(a.echo(value)) == value


@dataclasses.dataclass
class Tale:
    """Its class can be lost."""

    text: str = "once"


class Teller(aiodaft.Actor):
    """Forgets the class of its last error."""

    @aiodaft.method
    async def tell(self, value: Any = None) -> Tale:
        return Tale()

    @aiodaft.method
    async def forget(self) -> None:
        del globals()["Tale"]

    @aiodaft.method
    async def wait(self) -> None:
        """Show that the actor goes on."""


async def test_a_value_that_cannot_be_rebuilt_fails_the_calls_that_need_it(rt: aiodaft.Runtime) -> None:
    teller, other = await rt.spawn(Teller), await rt.spawn(Teller)
    await other.forget()
    elsewhere = other.tell(teller.tell())
    told, _forgotten = teller.tell(), teller.forget()
    # The value is there when the call comes.
    for failing, actor in ((elsewhere, other), (teller.tell(told), teller)):
        with pytest.raises(aiodaft.exceptions.SerializationError, match="no attribute 'Tale'") as caught:
            await failing
        assert caught.value.executed is False
        await actor.wait()


async def test_gathered_refs_stand_for_a_list(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    group = aiodaft.Refs([a.echo(1), a.echo("two"), b.echo([3])])
    gathered = group.gather()
    assert await b.echo(gathered) == [1, "two", [3]]
    assert await gathered == [1, "two", [3]]
    box = await b.echo(Box(gathered))
    assert await box.ref == [1, "two", [3]]
    with pytest.raises(ValueError, match="no refs"):
        aiodaft.Refs([]).gather()


async def test_using_a_ref_as_a_value_says_what_was_forgotten(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref: Any = echo.echo(1)
    for mistake in (
        lambda: bool(ref),
        lambda: ref + 1,
        lambda: 1 - ref,
        lambda: len(ref),
        lambda: ref[0],
        lambda: ref > 3,
        lambda: list(ref),
        lambda: int(ref),
        lambda: ref(),
        lambda: ref == 1,
        lambda: ref != 1,
        lambda: ref == "one",
        lambda: ref in [1, 2],
        lambda: f"{ref}",
    ):
        with pytest.raises(TypeError, match="did you forget `await`"):
            mistake()
    with pytest.raises(AttributeError, match="did you forget `await`"):
        _ = ref.shape
    assert await ref == 1
    assert str(ref) == f"{ref!r}" == "<Ref of Echo.echo, done>"


async def test_refs_are_compared_by_identity_as_containers_and_asyncio_do(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    first, second = echo.echo(1), echo.echo(1)
    assert first == first
    assert first != second
    assert (first == None, first == object()) == (False, False)  # noqa: E711 - under test
    assert first not in {None, second}
    assert {first: "first", second: "second"}[second] == "second"
    assert [second, None, first].index(first) == 2
    assert (first, 1) == (first, 1)
    done, pending = await asyncio.wait([first, second])
    assert (done, pending) == ({first, second}, set())


async def test_a_ref_takes_what_asyncio_gives_to_futures(rt: aiodaft.Runtime) -> None:
    echo, sleeper = await rt.spawn(Echo), await rt.spawn(Sleeper)
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: asyncio.Queue[str] = asyncio.Queue()

    def note(_: object) -> None:
        seen.put_nowait(variable.get())

    context = Context()
    context.run(variable.set, "given")
    ref = echo.echo(1)
    ref.add_done_callback(note, context=context)
    variable.set("current")
    ref.add_done_callback(note)
    variable.set("later")
    assert {await seen.get(), await seen.get()} == {"given", "current"}
    cancelled = sleeper.sleep(60)
    cancelled.cancel(msg="not needed")
    with pytest.raises(aiodaft.CallCancelled):
        await cancelled


async def test_free_ends_a_value_at_once(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(bytes(1_000_000))
    await ref.ready()
    assert (await rt.info(echo)).stored_bytes > 1_000_000
    ref.free()
    assert (await rt.info(echo)).stored_bytes == 0
    with pytest.raises(ReferenceError, match=r"freed by Ref.free"):
        await ref


async def test_handles_are_equal_where_they_lead_to_the_same_actor(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Echo), await rt.spawn(Echo)
    assert a == await b.echo(a)
    assert a != b
    assert len({a, await b.echo(a), b}) == 2
    assert (await rt.info(a)).name in repr(a)


async def test_a_loop_that_is_not_the_runtimes_gets_a_clear_error(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)

    def elsewhere() -> None:
        async def call() -> None:
            await echo.echo(1)

        asyncio.run(call())

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)


async def test_the_controller_sees_no_payload(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    a, b, c = await rt.spawn(Echo), await rt.spawn(Echo), await rt.spawn(Echo)
    await asyncio.gather(a.echo(0), b.echo(0), c.echo(0))
    big = a.echo(bytes(8_000_000))
    await big.ready()
    before = rt.traffic().control
    pulled = rt.traffic().payloads_received
    seen = c.echo([b.echo({"deep": [big]})])
    await seen.ready()
    assert rt.traffic().control - before < 4096
    assert rt.traffic().payloads_received == pulled
    assert sys.getsizeof(seen) < 200
    del sleeper
