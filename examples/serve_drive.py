"""Clients of `serve_disagg.py`: 64 prompts, while an engine is killed and roles change, compared with one process."""

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import httpx
import uvicorn
from serve_model import Weights, greedy, make_model, text

PROMPTS, COUNT = 64, 24  # COUNT tokens follow each
EXAMPLE = b"An expression can "


def make_prompts(seed: int = 0) -> list[bytes]:
    """Eight beginnings, each with eight different ends."""
    rng, source = random.Random(seed), text()
    begins = [rng.randrange(len(source) - 96) for _ in range(8)]
    ends = [rng.randrange(len(source) - 48) for _ in range(PROMPTS)]
    prompts = [source[begins[i % 8] :][:96] + source[ends[i] :][: rng.randrange(8, 49, 8)] for i in range(PROMPTS)]
    rng.shuffle(prompts)
    return prompts


def one_process(model: str, weights: Weights | None, prompts: list[bytes]) -> list[str]:
    alone = make_model(model, weights)
    return [tokens.decode(errors="replace") for tokens in greedy(alone, prompts, COUNT)]


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a server with the app, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=url, timeout=60) as client:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield client
            finally:
                server.should_exit = True


class Clients:
    """Half of them stream."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.tokens = asyncio.Queue[float]()  # when each streamed one came
        self.firsts, self.gaps = list[float](), list[float]()

    async def complete(self, number: int, prompt: bytes) -> str:
        asked = {"prompt": prompt.decode(), "max_tokens": COUNT, "stream": number % 2 == 0}
        if not asked["stream"]:
            response = await self.client.post("/v1/completions", json=asked)
            return response.raise_for_status().json()["choices"][0]["text"]
        parts, times = [], [time.monotonic()]
        async with self.client.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.raise_for_status().aiter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    times.append(time.monotonic())
                    self.tokens.put_nowait(times[-1])
        began, first, *_, last, _ = times  # the last event has no token
        self.firsts.append(first - began)
        self.gaps.append((last - first) / (COUNT - 1))
        return "".join(parts)

    async def disturb(self) -> None:
        """Kill an engine in the middle of its sequences, then let two others change their roles."""
        await self.wait_tokens(100)
        decoding = [engine for engine in (await self.state())["engines"] if engine["role"] == "decode"]
        os.kill(max(decoding, key=lambda engine: engine["sequences"])["pid"], signal.SIGKILL)
        await self.wait_tokens(100)
        roles = [engine["role"] for engine in (await self.state())["engines"]]
        if "prefill" in roles:
            await self.assign(roles.index("prefill"), "decode")
            await self.assign(roles.index("decode"), "prefill")

    async def wait_tokens(self, count: int) -> None:
        for _ in range(count):
            await self.tokens.get()

    async def assign(self, engine: int, role: str) -> None:
        (await self.client.put(f"/engines/{engine}", json={"role": role})).raise_for_status()

    async def state(self) -> dict[str, Any]:
        return (await self.client.get("/state")).raise_for_status().json()

    async def leave(self, prompt: bytes) -> float:
        """Leave in the middle of a stream; the seconds until no engine has anything of it."""
        asked = {"prompt": prompt.decode(), "max_tokens": 100, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=asked) as response:
            await anext(response.aiter_lines())
            left = time.monotonic()
        while any(engine["sequences"] or engine["pages_in_use"] for engine in (await self.state())["engines"]):
            pass
        return time.monotonic() - left


async def drive(app: Any, model: str, weights: Weights | None) -> None:
    prompts = make_prompts()
    expected = await asyncio.to_thread(one_process, model, weights, prompts)
    async with serving(app) as client:
        clients = Clients(client)
        await clients.state()  # answered once the engines run
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            completing = [tasks.create_task(clients.complete(*each)) for each in enumerate(prompts)]
            tasks.create_task(clients.disturb())
        seconds = time.monotonic() - began
        await clients.state()  # also the one that is made again
        freed = await clients.leave(prompts[0])
        example = await clients.complete(0, EXAMPLE)
        state = await clients.state()
    texts = [task.result() for task in completing]
    left = sum(engine["sequences"] + engine["pages_in_use"] for engine in state["engines"])
    report(state, clients, seconds, freed)
    assert texts == expected, f"{sum(map(str.__ne__, texts, expected))} completions differ from those of one process"
    assert left == 0, state
    print(f"{PROMPTS} completions are those of one process, and no engine has anything of them any more; one more:")
    print(f"  {EXAMPLE.decode()}{example}")


def report(state: dict[str, Any], clients: Clients, seconds: float, freed: float) -> None:
    engines = state["engines"]
    told, prompt, hit, messages, size = (
        sum(engine[key] for engine in engines)
        for key in ("loads_told", "prompt_tokens", "hit_tokens", "kv_messages", "kv_bytes")
    )
    print(f"  tokens                  {PROMPTS * COUNT / seconds:.0f}/s")
    print(f"  time to first token     {1000 * median(clients.firsts):.0f} ms")
    print(f"  time between tokens     {1000 * median(clients.gaps):.0f} ms")
    print(f"  known beginnings        {hit / prompt:.0%} of {prompt} prompt tokens")
    print(f"  keys and values         {messages} messages, {size} bytes")
    print(f"  loads pushed            {told}; to ask each engine for each prompt takes {2 * len(engines) * PROMPTS}")
    print(f"  resumed after the kill  {state['resumed']}")
    print(f"  freed after a client left in {1000 * freed:.0f} ms")
