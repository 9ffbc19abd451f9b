"""An engine in front of another server: our own one, as a program, is the far end (row US2)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from letter_engine import Letters, StoppingBytes, text_after
from web_server import serving

import aiodaft
from aiodaft import serve
from aiodaft.serve import HttpEngine, Request, Router, Sampling

pytestmark = [pytest.mark.programs, pytest.mark.timeout(120)]

COMMAND = [sys.executable, str(Path(__file__).parent.parent / "support" / "letter_server.py"), "%PORT%"]


async def written(router: Router, prompt: str, count: int, **options: object) -> str:
    request = Request((*prompt.encode(),), count, **options)  # type: ignore[arg-type]
    async with aclosing(router.generate(request)) as pieces:
        return bytes([token async for piece in pieces for token in piece.ids]).decode()


class Seen(HttpEngine):
    @aiodaft.method
    async def far_pid(self) -> int:
        return self.process.pid


async def test_texts_come_from_the_program_which_is_restarted_when_it_dies(rt: aiodaft.Runtime) -> None:
    async with rt.group(1, Seen, COMMAND) as engines, Router([], engines).running() as router:
        assert await written(router, "say ", 20) == text_after("say ", 20)
        sampling = Sampling(0.5, seed=7)
        assert await written(router, "say ", 20, sampling=sampling) == text_after("say ", 20, sampling)
        killed, text = False, b""
        async with aclosing(router.generate(Request((*b"say ",), 150))) as pieces:
            async for piece in pieces:
                text += bytes(piece.ids)
                if not killed:
                    os.kill(await engines[0].far_pid(), signal.SIGKILL)
                    killed = True
        assert text.decode() == text_after("say ", 150)
        assert router.resumed >= 1
        pid = await engines[0].far_pid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_with_the_tokens_of_the_model_stops_end_a_text_and_clients_that_leave_free_places(
    rt: aiodaft.Runtime,
) -> None:
    async with (
        rt.group(1, HttpEngine, COMMAND, Letters.places + 1, ids=True, fields={"model": "letters"}) as engines,
        Router([], engines).running() as router,
    ):
        text = text_after("say ", 60)
        stops = StoppingBytes.stops
        assert await written(router, "say ", 60, stops=stops) == text[: text.index("u") + 1]
        for _ in range(Letters.places + 1):
            async with aclosing(router.generate(Request((*b"hold",), 9))) as pieces:
                await anext(pieces)
        assert await written(router, "x", 9) == text_after("x", 9)


@pytest.mark.parametrize("ids", [True, False])
async def test_the_context_of_the_program_ends_a_chat_and_a_request_that_it_refuses_is_a_bad_one(ids: bool) -> None:
    @asynccontextmanager
    async def router(rt: aiodaft.Runtime) -> AsyncGenerator[Router]:
        async with (
            rt.group(1, HttpEngine, COMMAND, ids=ids, fields={"model": "letters"}) as engines,
            Router([], engines).running() as running,
        ):
            yield running

    app = serve.app(router, "letters", runtime=lambda: aiodaft.Runtime(preload=()))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        answer = await client.post("/v1/chat/completions", json=chat)
        if ids:
            assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 200)
        else:
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert "maximum context length is 200 tokens" in answer.json()["error"]["message"]


async def test_a_program_that_does_not_start_fails_the_spawn_with_its_last_words(rt: aiodaft.Runtime) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(aiodaft.ActorDied) as caught:
        async with asyncio.timeout(30):
            await rt.on(restart="temporary").spawn(HttpEngine, command)
    last_lines = "\n".join(caught.value.last_lines)
    assert "no such model" in last_lines
    assert "ended with status 1" in last_lines
