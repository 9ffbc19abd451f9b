"""OpenAI's completions over HTTP: answers, streams, clients that leave, more prompts than may wait (rows SV1, SV3)."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from serve_disagg import make_app, options_of
from serve_drive import serving
from serve_model import Weights, greedy, make_model, train

pytestmark = [pytest.mark.programs, pytest.mark.timeout(120)]

PROMPT, URL = "An expression ", "/v1/completions"


@pytest.fixture(scope="module")
def weights() -> Weights:
    return train(40)


def served(weights: Weights, *options: str) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return serving(make_app(options_of(["--prefill", "1", "--decode", "1", *options]), weights))


async def streamed(client: httpx.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    async with client.stream("POST", URL, json={"prompt": PROMPT, "stream": True, **asked}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines()]
    *events, end = [line.removeprefix("data: ") for line in lines[::2]]
    assert (set(lines[1::2]), end) == ({""}, "[DONE]")
    return [json.loads(event) for event in events]


async def test_answers_and_streams_are_those_of_openai_and_engines_take_roles(weights: Weights) -> None:
    (tokens,) = greedy(make_model("bytes", weights), [PROMPT.encode()], 40)
    expected = tokens.decode(errors="replace")
    async with served(weights) as client:
        answer = (await client.post(URL, json={"prompt": PROMPT, "max_tokens": 40, "user": "me"})).json()
        choice = {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 40, "total_tokens": len(PROMPT) + 40}
        assert (answer["object"], answer["choices"], answer["usage"]) == ("text_completion", [choice], usage)

        events = await streamed(client, max_tokens=40)
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 40 + ["length"]
        assert len({event["id"] for event in events}) == 1

        for wrong, status in [
            ({"prompt": ""}, 422),
            ({"prompt": PROMPT, "max_tokens": 0}, 422),
            ({"prompt": PROMPT, "best_of": 2}, 422),
            ({"prompt": PROMPT, "max_tokens": 1000, "stream": True}, 400),
        ]:
            assert (await client.post(URL, json=wrong)).status_code == status

        assert (await client.put("/engines/1", json={"role": "prefill"})).status_code == 409
        assert (await client.put("/engines/2", json={"role": "decode"})).status_code == 409
        assert (await client.put("/engines/0", json={"role": "decode"})).status_code == 200
        assert (await client.put("/engines/1", json={"role": "prefill"})).status_code == 200
        assert "".join(event["choices"][0]["text"] for event in await streamed(client, max_tokens=40)) == expected
        state = (await client.get("/state")).json()
        assert (state["waiting"], state["under_way"], state["resumed"]) == (0, 0, 0)
        assert [engine["role"] for engine in state["engines"]] == ["decode", "prefill"]
        assert [engine["kv_messages"] for engine in state["engines"]] == [2, 1]


async def steps_so_far(client: httpx.AsyncClient) -> tuple[int, bool]:
    """The number of steps that the engines have taken, and whether they are idle."""
    state = (await client.get("/state")).json()
    engines = state["engines"]
    busy = state["under_way"] or any(engine["sequences"] or engine["pages_in_use"] for engine in engines)
    return sum(engine["steps"] for engine in engines), not busy


async def steps_after_leaving(client: httpx.AsyncClient, stream: bool) -> int:
    """The number of steps that the engines take for a client that leaves as soon as they have begun."""
    before, _ = await steps_so_far(client)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.post(URL, json={"prompt": PROMPT, "max_tokens": 240, "stream": stream}))
        while (await steps_so_far(client))[1]:
            pass
        asking.cancel()
        while not (now := await steps_so_far(client))[1]:
            pass
        return now[0] - before


async def test_when_a_client_leaves_its_place_is_free_long_before_its_text_is_written(weights: Weights) -> None:
    async with served(weights) as client:
        for stream in (False, True):
            # On a busy machine, the client may hear late that its text is being written: one of some.
            taken = [await steps_after_leaving(client, stream)]
            while min(taken) > 120 and len(taken) < 8:
                taken.append(await steps_after_leaving(client, stream))
            assert min(taken) <= 120, taken


async def test_beyond_the_queue_prompts_are_refused_with_the_time_to_come_back(weights: Weights) -> None:
    async with served(weights, "--places", "2", "--queue", "2") as client:
        asked = [{"prompt": PROMPT, "max_tokens": 240, "stream": number % 2 == 0} for number in range(8)]
        answers = await asyncio.gather(*(client.post(URL, json=each) for each in asked))
        assert [answer.status_code for answer in answers].count(200) == 4
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        assert (await steps_so_far(client))[1]
