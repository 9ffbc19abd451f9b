"""OpenAI's API over HTTP: answers, streams, errors, clients that leave, more requests than may wait (rows SV3, US2)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from letter_engine import Letters, Opened, StoppingBytes, letter_after, text_after
from web_server import serving

import aiodaft
from aiodaft import serve
from aiodaft.serve.openai import Text
from aiodaft.serve.routing import Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def quick() -> aiodaft.Runtime:
    return aiodaft.Runtime(preload=(), unhandled="log")


@asynccontextmanager
async def served(opened: Opened | None = None, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    app = serve.app(opened or Opened(), "letters", runtime=quick, **options)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


async def asked(client: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json={"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(client: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    async with client.stream("POST", path, json={"stream": True, "temperature": 0, **fields}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines()]
    *events, end = [line.removeprefix("data: ") for line in lines[::2]]
    assert (set(lines[1::2]), end) == ({""}, "[DONE]")
    return [json.loads(event) for event in events]


async def test_completions_are_those_of_openai_plain_and_as_a_stream() -> None:
    expected = text_after("say ", 20)
    async with served() as client:
        answer = await asked(client, prompt="say ", max_tokens=20, model="letters", user="me", unknown={"field": 1})
        choice = {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}
        assert (answer["object"], answer["model"], answer["choices"]) == ("text_completion", "letters", [choice])
        assert answer["usage"] == usage
        assert len((await asked(client, prompt="say "))["choices"][0]["text"]) == 16

        events = await streamed(client, prompt="say ", max_tokens=20, stream_options={"include_usage": True})
        *parts, last = events
        assert "".join(part["choices"][0]["text"] for part in parts) == expected
        assert [part["choices"][0]["finish_reason"] for part in parts][-2:] == [None, "length"]
        assert {part["usage"] for part in parts} == {None}
        assert (last["choices"], last["usage"]) == ([], usage)
        assert len({event["id"] for event in events}) == 1

        echoed = await streamed(client, prompt="say ", max_tokens=3, echo=True)
        assert "".join(part["choices"][0]["text"] for part in echoed) == "say " + expected[:3]
        assert (await asked(client, prompt="say ", max_tokens=3, echo=True))["choices"][0]["text"] == "say " + expected[
            :3
        ]


async def test_a_request_may_have_several_prompts_as_text_or_tokens_and_several_texts_of_each() -> None:
    async with served() as client:
        for prompt in (["one", "two"], [[*b"one"], [*b"two"]]):
            answer = await asked(client, prompt=prompt, max_tokens=5)
            assert [one["text"] for one in answer["choices"]] == [text_after(each, 5) for each in ("one", "two")]
            assert answer["usage"]["prompt_tokens"] == 6
        answer = await asked(
            client, prompt=[*b"one"], max_tokens=5, n=3, temperature=0.5, seed=7, return_token_ids=True
        )
        texts = [text_after("one", 5, serve.Sampling(0.5, seed=7 + number)) for number in range(3)]
        assert [one["text"] for one in answer["choices"]] == texts
        assert [bytes(one["token_ids"]).decode() for one in answer["choices"]] == texts
        assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 15, "total_tokens": 18}
        events = await streamed(client, prompt=["one", "two"], max_tokens=5, n=2)
        found = [""] * 4
        for event in events:
            found[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert found == [text_after(each, 5) for each in ("one", "one", "two", "two")]
        # Without a seed, two texts differ.
        two = await asked(client, prompt="one", max_tokens=8, temperature=1, n=2)
        assert len({one["text"] for one in two["choices"]}) == 2


async def test_chats_have_the_template_of_the_tokenizer() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    expected = text_after("system: be brief\nuser: hello\nassistant:", 10)
    async with served() as client:
        answer = await asked(client, CHAT, messages=messages, max_tokens=10)
        message = {"role": "assistant", "content": expected}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        assert (answer["object"], answer["choices"]) == ("chat.completion", [choice])
        first, *parts = await streamed(client, CHAT, messages=messages, max_completion_tokens=10)
        assert (first["object"], first["choices"][0]["delta"]) == (
            "chat.completion.chunk",
            {"role": "assistant", "content": ""},
        )
        assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == expected
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        # Without a limit, the text fills the context.
        answer = await asked(client, CHAT, messages=messages)
        assert answer["usage"]["total_tokens"] == 200


async def test_a_text_ends_before_a_stop_string_and_at_a_stop_token() -> None:
    text = text_after("say ", 100)
    async with served(tokenizer=StoppingBytes()) as client:
        for stop in (text[5:8], [text[5:8], "never"]):
            answer = await asked(client, prompt="say ", max_tokens=100, stop=stop)
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text[:5], "stop")
        events = await streamed(client, prompt="say ", max_tokens=100, stop=text[5:8])
        assert "".join(event["choices"][0]["text"] for event in events) == text[:5]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        end = text.index("u")
        answer = await asked(client, prompt="say ", max_tokens=100)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text[:end], "stop")
        assert answer["usage"]["completion_tokens"] == end + 1
        answer = await asked(client, prompt="say ", max_tokens=60, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = await asked(client, prompt="say ", max_tokens=60, stop_token_ids=[ord(text[3])])
        assert answer["choices"][0]["text"] == text[: text.index(text[3]) + 1]


async def test_logprobs_have_the_forms_of_completions_and_of_chats() -> None:
    async with served() as client:
        found = (await asked(client, prompt="x", max_tokens=2, logprobs=2))["choices"][0]["logprobs"]
        first, second = text_after("x", 2)
        assert (found["tokens"], found["text_offset"]) == ([first, second], [0, 1])
        assert found["token_logprobs"] == [math.log(0.5)] * 2
        assert set(found["top_logprobs"][0]) == {first, chr(ord(first) + 1)}
        events = await streamed(client, prompt="x", max_tokens=2, logprobs=1)
        offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events[:2]]
        assert offsets == [[0], [1]]
        messages = [{"role": "user", "content": "x"}]
        answer = await asked(client, CHAT, messages=messages, max_tokens=1, logprobs=True, top_logprobs=1)
        (one,) = answer["choices"][0]["logprobs"]["content"]
        assert (one["token"], one["bytes"]) == (answer["choices"][0]["message"]["content"], [ord(one["token"])])
        assert [each["token"] for each in one["top_logprobs"]] == [one["token"]]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [1, "x"]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": [1, 256]}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"256": 1}}, 400, "logit_bias", None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias", None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": "nan"}}, 400, "logit_bias", None),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 10**400}}, 400, "logit_bias", None),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt", None),
        (COMPLETIONS, {"prompt": "x", "timeout": math.inf}, 400, "timeout", None),
        (COMPLETIONS, {"prompt": "x", "timeout": 0}, 400, "timeout", None),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature", None),
        (COMPLETIONS, {"prompt": "x", "temperature": 2.5}, 400, "temperature", None),
        (COMPLETIONS, {"prompt": "x", "n": True}, 400, "n", None),
        (COMPLETIONS, {"prompt": "x", "stop": [3]}, 400, "stop", None),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream", None),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", "unsupported_parameter"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1000, "stream": True}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        (CHAT, {}, 400, "messages", None),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages", None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", None),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools", "unsupported_parameter"),
    ],
)
async def test_errors_have_the_status_and_the_body_of_openai(
    path: str, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    app = serve.app(Opened(), "letters")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_router(app)), base_url="http://here") as client:
        response = await client.post(path, content=json.dumps(fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_a_router_whose_engines_are_gone_is_unavailable() -> None:
    transport = httpx.ASGITransport(with_router(serve.app(Opened(), "letters"), role="gone"))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await client.get("/health")).status_code == 503


def with_router(app: Any, role: Role = "decode") -> Any:
    """The app inside of the ingress, with a router whose engine is not there."""
    router = serve.Router([], [None])  # type: ignore[list-item]
    router.members[0].load, router.members[0].role = serve.Load(4, context=200), role

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"router": router}
        await app._app(scope, receive, send)  # noqa: SLF001 - no engine is needed for these answers

    return inner


async def test_what_is_no_json_or_no_path_has_an_error_of_openai_too() -> None:
    transport = httpx.ASGITransport(with_router(serve.app(Opened(), "letters")))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answers = [
            await client.post(COMPLETIONS, content=b"{"),
            await client.post(COMPLETIONS, content=b"[1]"),
            await client.post(COMPLETIONS, content=b"[" * 100_000),
            await client.get("/v1/nothing"),
            await client.get(COMPLETIONS),
            await client.get("/v1/models/other"),
        ]
        assert [answer.status_code for answer in answers] == [400, 400, 400, 404, 405, 404]
        assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("letters", "model", 200)
        assert (await client.get("/v1/models/letters")).json() == model
        assert (await client.get("/health")).status_code == 200


async def test_metrics_have_the_names_of_vllm() -> None:
    async with served() as client:
        await asked(client, prompt="say ", max_tokens=20)
        lines = (await client.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = 'model_name="letters"'
    for name, value in (
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0.25),
        ("prefix_cache_queries_total", 70),
        ("prefix_cache_hits_total", 32),
        ("prompt_tokens_total", 4),
        ("generation_tokens_total", 20),
        ("time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", 19),
        ("e2e_request_latency_seconds_count", 1),
    ):
        assert float(values[f"vllm:{name}{{{label}}}"]) == value, name
    assert float(values[f'vllm:request_success_total{{finished_reason="length",{label}}}']) == 1


async def tokens_written(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


async def held(opened: Opened) -> int:
    return sum([await member.engine.count_held() for member in opened.router.members])  # type: ignore[attr-defined]


async def test_clients_that_leave_free_their_places_and_beyond_the_queue_requests_are_refused() -> None:
    opened = Opened(queue=1)
    async with served(opened) as client, asyncio.TaskGroup() as tasks:
        fields = {"prompt": "hold", "max_tokens": 9}
        holding = [tasks.create_task(client.post(COMPLETIONS, json=fields)) for _ in range(Letters.places + 1)]
        while not (await held(opened) == Letters.places and opened.router.turns.waiting):
            await asyncio.sleep(0)
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        assert (response.status_code, int(response.headers["retry-after"]) > 0) == (503, True)
        assert response.json()["error"]["code"] == "overloaded"
        for one in holding:
            one.cancel()
        while await held(opened) or opened.router.under_way or opened.router.turns.waiting:
            await asyncio.sleep(0)
        # One that streams, too; the token that it got counts.
        before = await tokens_written(client)
        async with client.stream("POST", COMPLETIONS, json={**fields, "stream": True}) as response:
            await anext(response.aiter_lines())
            assert opened.router.under_way == 1
        while await held(opened) or opened.router.under_way:
            await asyncio.sleep(0)
        assert await tokens_written(client) == before + 1


async def test_a_request_that_takes_too_long_is_answered_by_504_and_ends() -> None:
    opened = Opened()
    async with served(opened, timeout=60) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "hold", "timeout": 0.05})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        async with client.stream(
            "POST", COMPLETIONS, json={"prompt": "hold", "timeout": 0.05, "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        while await held(opened) or opened.router.under_way:
            await asyncio.sleep(0)


async def test_a_stream_goes_on_at_another_engine_when_one_is_killed() -> None:
    opened = Opened(engines=2)
    async with (
        served(opened) as client,
        client.stream(
            "POST", COMPLETIONS, json={"prompt": "say ", "max_tokens": 150, "stream": True, "temperature": 0}
        ) as response,
    ):
        lines = response.aiter_lines()
        parts = [await anext(lines)]
        (busy,) = (member for member in opened.router.members if member.under_way)
        os.kill(await busy.engine.pid(), signal.SIGKILL)  # type: ignore[attr-defined]
        parts += [line async for line in lines]
    events = [json.loads(line.removeprefix("data: ")) for line in parts if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text_after("say ", 150)
    assert opened.router.resumed == 1


def parts_of(ids: list[int], *stops: str) -> list[str]:
    text, found = Text(serve.Bytes(), stops), list[str]()
    for token in ids:
        part, is_over = text.add([token])
        found.append(part)
        if is_over:
            return found
    return [*found, text.end()]


def test_text_comes_in_whole_characters_and_holds_back_what_may_be_a_stop_string() -> None:
    assert parts_of([*"aé€😀b".encode()]) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
    assert parts_of([0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]
    assert parts_of([0xC3, 0x61, 0x62]) == ["", "\ufffda", "b", ""]
    assert parts_of([*b"abcab"], "abd") == ["", "", "abc", "", "", "ab"]
    assert parts_of([*b"xabdy"], "abd") == ["x", "", "", ""]
    assert parts_of([*b"aabd"], "abd", "zz") == ["", "a", "", ""]


def test_letters_are_as_the_seed_says() -> None:
    assert letter_after([1], serve.Sampling()) == letter_after([1], serve.Sampling(seed=9))
    assert letter_after([1], serve.Sampling(1.0, seed=9)) != letter_after([1], serve.Sampling(1.0, seed=8))
