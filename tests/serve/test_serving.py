"""Disaggregated serving: tokens are those of one process, through deaths, departures and changes of roles (rows
SV1-SV3).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from itertools import pairwise
from typing import NoReturn

import pytest
from serve_disagg import open_router, options_of
from serve_model import LAYERS, WIDTH, Weights, greedy, make_model, text, train

import aiodaft
from aiodaft.serve import Given, Piece, Request, Router, Sampling, Sizes, TorchEngine
from aiodaft.serve.torch_engine import Counts

pytestmark = [pytest.mark.programs, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

PRELOAD = ("torch",)
COUNT = 16
KV = 4 * 2 * LAYERS * WIDTH  # bytes of the keys and values of a token


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.fixture(scope="module")
def weights() -> Weights:
    return train(40)


@pytest.fixture(scope="module")
def prompts() -> list[bytes]:
    """Prompts that begin alike in groups, long enough for keys and values of 64 KiB and more."""
    rng, source = random.Random(0), text()
    begins = [source[start:][:64] for start in rng.sample(range(len(source) - 64), 8)]
    ends = [source[start:][: rng.randrange(4, 60, 8)] for start in rng.sample(range(len(source) - 64), 64)]
    return [begins[number % 8] + end for number, end in enumerate(ends)]


@pytest.fixture(scope="module")
def expected(weights: Weights, prompts: list[bytes]) -> list[bytes]:
    return greedy(make_model("bytes", weights), prompts, COUNT)


def opened(rt: aiodaft.Runtime, weights: Weights, *options: str) -> AbstractAsyncContextManager[Router]:
    return open_router(rt, options_of(list(options)), weights)


async def completed(router: Router, prompt: bytes, count: int = COUNT, tenant: str = "") -> bytes:
    async with aclosing(router.generate(Request((*prompt,), count, tenant=tenant))) as pieces:
        return bytes([token async for piece in pieces for token in piece.ids])


async def all_completed(router: Router, prompts: Sequence[bytes]) -> list[bytes]:
    return await asyncio.gather(*(completed(router, prompt) for prompt in prompts))


async def counts_of(router: Router) -> list[Counts]:
    return [await member.engine.counts() for member in router.members]


async def nothing_is_left(rt: aiodaft.Runtime, router: Router, places: int = Sizes().places) -> None:
    while any(counts.sequences or counts.pages_in_use for counts in await counts_of(router)):
        await asyncio.sleep(0)
    for member in router.members:
        # Keys and values on their way lie in the process of the engine that prefilled.
        while (await rt.info(member.engine)).stored_bytes:
            await asyncio.sleep(0)
    assert (router.under_way, router.turns.waiting) == (0, [])
    assert {member.free for member in router.members} == {places}


async def test_64_prompts_have_the_tokens_of_one_process_and_their_keys_and_values_move_once(
    rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes], expected: list[bytes]
) -> None:
    async with opened(rt, weights) as router:
        here = rt.traffic().payload
        assert await all_completed(router, prompts) == expected
        await nothing_is_left(rt, router)
        first, second, third, fourth = counts = await counts_of(router)
        assert first.kv_messages + second.kv_messages == 64
        assert first.kv_bytes + second.kv_bytes == KV * sum(map(len, prompts))
        assert third.kv_messages == fourth.kv_messages == 0
        assert rt.traffic().payload == here
        assert min(count.steps for count in counts) > 0
        # Nothing but prompts is prefilled, and where they begin alike, once for many.
        assert third.prompt_tokens == fourth.prompt_tokens == 0
        assert first.hit_tokens + second.hit_tokens > 0.3 * sum(map(len, prompts))


async def test_layer_by_layer_each_layer_is_a_message(
    rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes]
) -> None:
    # Values below 64 KiB travel within the messages of calls, which are not counted one by one.
    long = [prompt[:65] * 2 for prompt in prompts[:8]]
    async with opened(rt, weights, "--by-layer") as router:
        assert await all_completed(router, long) == greedy(make_model("bytes", weights), long, COUNT)
        await nothing_is_left(rt, router)
        first, second, *_ = await counts_of(router)
        assert first.kv_messages + second.kv_messages == LAYERS * len(long)
        assert first.kv_bytes + second.kv_bytes == KV * sum(map(len, long))


@pytest.mark.parametrize("options", [("--together",), ("--prefill", "0")], ids=["two-actors", "one-actor"])
async def test_in_one_process_keys_and_values_do_not_move(
    options: tuple[str, ...], rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes], expected: list[bytes]
) -> None:
    async with opened(rt, weights, *options) as router:
        assert await all_completed(router, prompts[:16]) == expected[:16]
        await nothing_is_left(rt, router)
        counts = await counts_of(router)
        assert len({count.pid for count in counts}) == 2
        assert [(count.kv_messages, count.kv_bytes) for count in counts] == [(0, 0)] * len(counts)
        assert min(count.steps for count in counts) > 0


async def test_what_loses_its_pages_goes_on_from_its_tokens(
    rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes], expected: list[bytes]
) -> None:
    async with opened(rt, weights, "--prefill", "0", "--decode", "1", "--pages", "20") as router:
        assert await all_completed(router, prompts[:24]) == expected[:24]
        await nothing_is_left(rt, router)
        assert sum(count.preempted for count in await counts_of(router)) > 0


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_prompts_go_on_when_an_engine_is_killed_and_others_change_their_roles(
    victim: str, rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes], expected: list[bytes]
) -> None:
    came = asyncio.Queue[int]()

    async def complete(prompt: bytes) -> bytes:
        tokens = b""
        async with aclosing(router.generate(Request((*prompt,), COUNT))) as more:
            async for piece in more:
                tokens += bytes(piece.ids)
                came.put_nowait(len(tokens))
        return tokens

    async def have_come(count: int) -> None:
        for _ in range(count):
            await came.get()

    async with opened(rt, weights, "--places", "8") as router, asyncio.TaskGroup() as tasks:
        member = next(member for member in router.members if member.role == victim)
        pid = (await member.engine.counts()).pid
        if victim == "prefill":
            # A prompt is read in less time than it takes to ask for the counts.
            os.kill(pid, signal.SIGSTOP)
        completing = [tasks.create_task(complete(prompt)) for prompt in prompts]
        if victim == "decode":
            await have_come(100)
        while not member.under_way:
            await router.changed.wait()
        os.kill(pid, signal.SIGKILL)
        await have_come(100)
        router.assign(0, "decode")
        router.assign(3, "prefill")
        assert await asyncio.gather(*completing) == expected
        assert router.resumed > 0
        await nothing_is_left(rt, router, places=8)
        assert [member.role for member in router.members] == ["decode", "prefill", "decode", "prefill"]
        assert (await rt.info(member.engine)).restarts == 1
        # With their new roles and the new process, they serve as before.
        before = await counts_of(router)
        assert await all_completed(router, prompts) == expected
        assert all(now.steps > then.steps for now, then in zip(await counts_of(router), before, strict=True))


class Fragile(TorchEngine):
    """Cannot compute a step."""

    async def __aenter__(self) -> TorchEngine:
        self.model.step = self.fail  # type: ignore[method-assign]
        return await super().__aenter__()

    def fail(self, *_: object) -> NoReturn:
        raise MemoryError("no room for keys and values")


async def test_a_prompt_that_kills_engines_fails_in_the_end(rt: aiodaft.Runtime, weights: Weights) -> None:
    async with rt.group(2, Fragile, make_model, "bytes", weights) as fragile, Router([], fragile).running() as router:
        with pytest.raises(aiodaft.ActorDied) as caught:
            await completed(router, b"poison")
        assert "MemoryError: no room for keys and values" in caught.value.last_lines
        assert router.resumed == 3
        assert router.under_way == 0


async def test_without_an_engine_that_decodes_and_is_restarted_there_is_an_error(
    rt: aiodaft.Runtime, weights: Weights
) -> None:
    place = rt.on(restart="temporary")
    async with (
        place.group(1, TorchEngine, make_model, "bytes", weights) as prefill,
        place.group(1, TorchEngine, make_model, "bytes", weights) as decode,
        Router(prefill, decode).running() as router,
    ):
        with pytest.raises(ValueError, match="the last engine that decodes"):
            router.assign(1, "prefill")
        await rt.kill(prefill[0])
        # The other one does both.
        assert len(await completed(router, b"alone")) == COUNT
        await rt.kill(decode[0])
        with pytest.raises(RuntimeError, match="all engines that decode are gone for good"):
            await completed(router, b"nobody")


class Measured(TorchEngine):
    @aiodaft.method
    async def measure(self) -> tuple[int, int, int, list[int]]:
        """Read a long prompt while another one is decoded; the token, its steps, and those of the other's tokens."""
        steps: list[int] = []
        decoding = asyncio.Event()

        async def decode() -> None:
            async for _ in TorchEngine.decode.__wrapped__(self, Request((*b"short",), 100)):
                steps.append(self.steps)
                decoding.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode())
            await decoding.wait()
            begun = self.steps
            async with aclosing(TorchEngine.decode.__wrapped__(self, Request((*b"long " * 40,), 1))) as long:
                first = await anext(long)
            ended = self.steps
        return first.ids[0], begun, ended, steps


class Left(TorchEngine):
    @aiodaft.method
    async def leave(self) -> tuple[int, int, int]:
        """Leave two texts, of which one waits; the sequences, pages and further steps at once after that."""
        begun, queued = (TorchEngine.decode.__wrapped__(self, Request((*b"left",), 200)) for _ in range(2))
        await anext(begun)
        waiting = aiodaft.create_task(anext(queued))
        while not self.batch.waiting:
            await asyncio.sleep(0)
        before = self.steps
        waiting.cancel()
        await asyncio.wait([waiting])
        for one in (begun, queued):
            await one.aclose()
        return len(self.batch.running) + len(self.batch.waiting), self.batch.pages.in_use, self.steps - before


async def test_a_client_that_leaves_frees_its_place_and_its_pages_within_two_steps(
    rt: aiodaft.Runtime, weights: Weights
) -> None:
    async with rt.spawn(Left, make_model, "bytes", weights, sizes=Sizes(places=1)) as engine:
        sequences, pages, steps = await engine.leave()
    assert (sequences, pages) == (0, 0)
    assert steps <= 2


async def test_while_a_long_prompt_comes_others_get_a_token_at_each_step(rt: aiodaft.Runtime, weights: Weights) -> None:
    async with rt.spawn(Measured, make_model, "bytes", weights, sizes=Sizes(chunk=8)) as engine:
        first, begun, ended, steps = await engine.measure()
    assert first == greedy(make_model("bytes", weights), [b"long " * 40], 1)[0][0]
    assert ended - begun >= 200 // 8
    assert steps[-1] > ended
    assert max(after - before for before, after in pairwise(steps)) <= 2


SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=11, presence_penalty=0.3)


async def moved_along(router: Router, prompt: bytes, sampling: Sampling, stops_at: Sequence[int]) -> bytes:
    """Move a request whenever it has so many tokens; one that ends first stays."""
    tokens = list[int]()
    async with aclosing(router.generate(Request((*prompt,), 100, sampling))) as pieces:
        async for piece in pieces:
            tokens.extend(piece.ids)
            if len(tokens) in stops_at:
                (flight,) = (one for one in router.flights if one.request.tokens == (*prompt,))
                await router.move(flight)
    return bytes(tokens)


async def test_requests_move_in_the_middle_of_their_texts_and_nothing_is_computed_twice(
    rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes]
) -> None:
    some = [prompts[number] for number in range(6)]
    async with opened(rt, weights, "--prefill", "0", "--decode", "1") as alone:
        expected = await asyncio.gather(*(moved_along(alone, one, SAMPLED, ()) for one in some))
    moved = 0
    while not moved:  # they may have ended before
        async with opened(rt, weights, "--prefill", "0", "--decode", "2") as router:
            places = [(5, 25), (10, 30), (), (1,), (20,), (15,)]
            texts = [moved_along(router, *each) for each in zip(some, [SAMPLED] * 6, places, strict=True)]
            assert await asyncio.gather(*texts) == expected
            moved = router.moved
            assert moved <= 7
            assert router.resumed == 0
            await nothing_is_left(rt, router)
            # No prompt was read again.
            assert sum(count.prompt_tokens for count in await counts_of(router)) == sum(map(len, some))


async def test_a_request_pauses_for_at_most_two_steps_while_it_moves(rt: aiodaft.Runtime, weights: Weights) -> None:
    moved = False
    two = "--prefill", "0", "--decode", "2"
    while not moved:  # it may have ended before
        async with opened(rt, weights, *two) as router, aclosing(router.generate(Request((*b"pause",), 200))) as pieces:
            before = [await anext(pieces) for _ in range(20)]
            moved = await router.move(*router.flights)
            after = [piece async for piece in pieces]
            steps = sum(count.steps for count in await counts_of(router))
        assert len(before) + len(after) == 200
        # The token that follows the prompt took a step, as each other; one may have been under way when it stopped.
        assert steps <= 200 + 1


class Mortal(TorchEngine):
    """Dies when it is to take the rest of a request."""

    @aiodaft.method
    async def take(self, name: str, given: Given) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Refusing(TorchEngine):
    """Dies when it is to have a request that moves, before the other engine has let it go."""

    @aiodaft.method(ordered=False)
    async def decode(
        self, request: Request, given: Given | None = None, layers: list[object] | None = None
    ) -> AsyncGenerator[Piece]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield Piece(())


@pytest.mark.parametrize("cls", [Mortal, Refusing])
async def test_a_request_stays_or_goes_on_when_the_engine_dies_that_it_was_to_move_to(
    cls: type[TorchEngine], rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes]
) -> None:
    (expected,) = greedy(make_model("bytes", weights), prompts[:1], 120)
    async with (
        rt.group(1, TorchEngine, make_model, "bytes", weights) as living,
        rt.group(1, cls, make_model, "bytes", weights) as dying,
        Router([], living, {"decode": lambda _, members: members[0]}).running() as router,
    ):
        dies = router.add(dying[0], "decode")
        while not router.members[dies].load:
            await router.changed.wait()
        tokens = list[int]()
        async with aclosing(router.generate(Request((*prompts[0],), 120))) as pieces, asyncio.TaskGroup() as tasks:
            async for piece in pieces:
                tokens.extend(piece.ids)
                if len(tokens) == 10:
                    moving = tasks.create_task(router.move(*router.flights, dies))
        assert bytes(tokens) == expected
        assert moving.result() is False
        assert (router.moved, router.resumed) == (0, 1 if cls is Mortal else 0)
        counts = await router.members[0].engine.counts()
        assert (counts.sequences, counts.pages_in_use) == (0, 0)


async def test_an_engine_is_drained_and_takes_another_role_without_a_lost_token(
    rt: aiodaft.Runtime, weights: Weights, prompts: list[bytes]
) -> None:
    expected = greedy(make_model("bytes", weights), prompts[:16], 60)
    moved, options = 0, ("--prefill", "1", "--decode", "2")
    while not moved:  # they may have ended before
        async with opened(rt, weights, *options) as router, asyncio.TaskGroup() as tasks:
            completing = [tasks.create_task(completed(router, prompt, 60)) for prompt in prompts[:16]]
            while sum(len(flight.ids) for flight in router.flights) < 200 and not all(
                map(asyncio.Task.done, completing)
            ):
                await asyncio.sleep(0)
            await router.drain(1, "prefill")
            assert not router.members[1].under_way or router.members[1].role == "prefill"
            assert await asyncio.gather(*completing) == expected
            moved = router.moved
            await nothing_is_left(rt, router)


async def test_what_waits_for_a_place_is_refused_beyond_the_queue_and_a_client_that_leaves_makes_room(
    rt: aiodaft.Runtime, weights: Weights
) -> None:
    async with opened(rt, weights, "--prefill", "0", "--decode", "1", "--places", "1", "--queue", "1") as router:
        first = router.generate(Request((*b"first",), 200))
        await anext(first)
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(completed(router, b"second"))
            while not router.turns.waiting:
                await asyncio.sleep(0)
            with pytest.raises(aiodaft.Overloaded, match="1 requests wait"):
                await completed(router, b"third")
            await first.aclose()
            assert len(await second) == COUNT
        await nothing_is_left(rt, router, places=1)


async def test_a_tenant_with_many_prompts_does_not_hold_up_another_one(rt: aiodaft.Runtime, weights: Weights) -> None:
    done: list[str] = []

    async def complete(prompt: bytes, tenant: str) -> None:
        await completed(router, prompt, 4, tenant)
        done.append(tenant)

    one = "--prefill", "0", "--decode", "1", "--places", "1", "--quantum", "10"
    async with opened(rt, weights, *one) as router, asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(complete(b"many %d" % number, "many"))
        tasks.create_task(complete(b"single", "single"))
    assert done.index("single") <= 2
