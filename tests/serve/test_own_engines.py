"""The router in front of engines that do not keep to the protocol: no token too many, no request without an end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

import aiodaft
from aiodaft import serve
from aiodaft.exceptions import OutcomeUnknown


class Endless(serve.Engine):
    """Counts up from the length of the prompt, and never ends."""

    @aiodaft.method(ordered=False)
    async def decode(
        self, request: serve.Request, given: serve.Given | None = None, layers: list[Any] | None = None
    ) -> AsyncGenerator[serve.Piece]:
        token = len(request.tokens)
        while True:
            yield serve.Piece((token,))
            token += 1


class Wordless(serve.Engine):
    @aiodaft.method(ordered=False)
    async def decode(
        self, request: serve.Request, given: serve.Given | None = None, layers: list[Any] | None = None
    ) -> AsyncGenerator[serve.Piece]:
        yield serve.Piece(())


async def text_of(router: serve.Router, request: serve.Request) -> list[int]:
    async with aclosing(router.generate(request)) as pieces:
        return [token async for piece in pieces for token in piece.ids]


async def test_a_text_has_no_token_behind_its_count_or_its_stop() -> None:
    async with (
        aiodaft.Runtime(preload=()) as rt,
        rt.group(1, Endless) as engines,
        serve.Router([], engines).running() as router,
    ):
        assert await text_of(router, serve.Request((0, 0), 3)) == [2, 3, 4]
        assert await text_of(router, serve.Request((0, 0), 9, stops=frozenset({3}))) == [2, 3]
        assert (router.under_way, router.members[0].under_way) == (0, set())


async def test_an_engine_that_ends_without_a_token_fails_the_request() -> None:
    async with (
        aiodaft.Runtime(preload=()) as rt,
        rt.group(1, Wordless) as engines,
        serve.Router([], engines).running() as router,
    ):
        with pytest.raises(OutcomeUnknown, match=r"Wordless.* has no tokens"):
            await text_of(router, serve.Request((0,), 3))
        assert router.under_way == 0


class Brief(Endless):
    """Tells its load once, and ends the stream."""

    asked = 0

    @aiodaft.method
    async def loads(self) -> AsyncGenerator[serve.Load]:
        self.asked += 1
        yield serve.Load(4)

    @aiodaft.method
    async def times_asked(self) -> int:
        return self.asked


async def test_an_engine_whose_loads_end_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodaft.serve.routing._AGAIN", 3600)
    async with (
        aiodaft.Runtime(preload=()) as rt,
        rt.group(1, Brief) as engines,
        serve.Router([], engines).running() as router,
    ):
        assert [await text_of(router, serve.Request((0, 0), 2)) for _ in range(3)] == [[2, 3]] * 3
        assert await engines[0].times_asked() == 1
        with pytest.raises(ValueError, match="'prefill', 'decode' or 'drained', not 'prefil'"):
            router.assign(0, "prefil")  # type: ignore[arg-type]


class Silent(serve.Engine):
    """Has ended for good before it tells its load."""

    @aiodaft.method
    async def loads(self) -> AsyncGenerator[serve.Load]:
        raise SystemExit(1)
        yield


async def test_a_router_runs_without_an_engine_that_was_gone_before_it_told_its_load() -> None:
    async with (
        aiodaft.Runtime(preload=()) as rt,
        rt.group(1, Endless) as engines,
        rt.on(restart="temporary").group(1, Silent) as silent,
        serve.Router([], [*engines, *silent]).running() as router,
    ):
        assert [member.role for member in router.members] == ["decode", "gone"]
        assert await text_of(router, serve.Request((0, 0), 2)) == [2, 3]
