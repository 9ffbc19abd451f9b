"""Public clients of OpenAI's API, unpatched, against the server (row US2)."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from letter_engine import Letters, Opened, text_after
from web_server import serving

import aiodaft
from aiodaft import serve

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.programs, pytest.mark.timeout(120)]

SUPPORT = Path(__file__).parent.parent / "support"
HELLO = [{"role": "user", "content": "hello"}]
AFTER_HELLO = "user: hello\nassistant:"


@asynccontextmanager
async def served(engines: int = 2, queue: int = 64) -> AsyncGenerator[str]:
    opened = Opened(engines, queue)
    app = serve.app(opened, "letters", runtime=lambda: aiodaft.Runtime(preload=(), unhandled="log"))
    async with serving(app) as url:
        yield f"{url}/v1"


async def test_the_client_of_openai_asks_streams_and_gets_its_errors() -> None:
    async with served() as url, openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["letters"]
        answer = await client.completions.create(
            model="letters", prompt="say ", max_tokens=9, temperature=0, logprobs=1
        )
        assert (answer.choices[0].text, answer.usage.total_tokens) == (text_after("say ", 9), 13)
        assert len(answer.choices[0].logprobs.tokens) == 9
        options: dict[str, Any] = {"model": "letters", "messages": HELLO, "max_tokens": 9, "temperature": 0}
        chat = await client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2, seed=1, user="me")
        assert [choice.message.content for choice in chat.choices] == [text_after(AFTER_HELLO, 9)] * 2
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(**options, stream=True, stream_options=usage)
        parts = [part async for part in stream]
        assert "".join(part.choices[0].delta.content for part in parts[:-1]) == text_after(AFTER_HELLO, 9)
        assert parts[-1].usage.completion_tokens == 9
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200") as caught:
            await client.completions.create(model="letters", prompt="x" * 300)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="The model `gpt-9` does not exist"):
            await client.chat.completions.create(model="gpt-9", messages=HELLO)


def ask(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        stream = client.completions.create(model="letters", prompt="say ", max_tokens=9, temperature=0, stream=True)
        return "".join(part.choices[0].text for part in stream)


async def test_so_does_its_client_for_threads() -> None:
    async with served() as url:
        assert await asyncio.to_thread(ask, url) == text_after("say ", 9)


async def test_300_requests_at_once_are_all_answered_as_clients_that_are_refused_come_back() -> None:
    async with (
        served(queue=200) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=9) as client,
        asyncio.TaskGroup() as tasks,
    ):
        options: dict[str, Any] = {"model": "letters", "max_tokens": 4, "temperature": 0}
        asked = [tasks.create_task(client.completions.create(prompt=f"{n} ", **options)) for n in range(300)]
        answers = await asyncio.gather(*asked)
        assert [answer.choices[0].text for answer in answers] == [text_after(f"{n} ", 4) for n in range(300)]


async def test_a_client_that_leaves_a_stream_of_openai_frees_its_place() -> None:
    async with served(1) as url, openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for _ in range(Letters.places + 1):
            stream = await client.completions.create(model="letters", prompt="hold", max_tokens=9, stream=True)
            await anext(aiter(stream))
            await stream.close()
        answer = await client.completions.create(model="letters", prompt="x", max_tokens=1, temperature=0)
        assert answer.choices[0].text == text_after("x", 1)


@pytest.mark.parametrize(("client", "package"), [("langchain", "langchain_openai"), ("litellm", "litellm")])
async def test_other_clients_ask_and_stream(client: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    async with served() as url:
        command = [sys.executable, str(SUPPORT / "public_clients.py"), client, url]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    text, size, streamed, *several = json.loads(output.splitlines()[-1])
    assert [text, size, streamed] == [text_after(AFTER_HELLO, 9), 9, text_after(AFTER_HELLO, 9)]
    assert several == [text_after(f"system: {n}\nuser: x\nassistant:", 9) for n in range(len(several))]
