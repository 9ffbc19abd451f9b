"""An inference server: engines that prefill, engines that decode, and a router behind OpenAI's API.

    python examples/serve_disagg.py                       # completes 64 prompts, while an engine dies and roles change
    python examples/serve_disagg.py --serve --port 8000   # until Ctrl-C
    curl -N 127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "The target list ", "max_tokens": 80, "stream": true}'
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import httpx
import uvicorn
from serve_model import Weights, greedy, make_model, text, train

import aiodaft
from aiodaft import serve

PROMPTS, COUNT = 64, 24  # COUNT tokens follow each
POLICIES = "round_robin", "least_work", "two_choices", "prefix_locality", "sticky"


@asynccontextmanager
async def open_router(
    rt: aiodaft.Runtime, options: SimpleNamespace, weights: Weights | None
) -> AsyncGenerator[serve.Router]:
    """The engines, and the router in front of them."""
    engine = serve.TorchEngine, make_model, options.model, rt.put(weights)
    sizes = serve.Sizes(options.pages, options.places, options.chunk)
    policies = {role: getattr(serve, getattr(options, f"{role}_policy")) for role in ("prefill", "decode")}
    turns = serve.Turns(options.quantum, options.queue)
    async with AsyncExitStack() as groups:
        prefill = ()
        if options.prefill:
            prefill = await groups.enter_async_context(rt.group(options.prefill, *engine, sizes=sizes))
        # In one process, keys and values need not move.
        place = rt.on(with_=prefill) if options.together else rt
        decode = await groups.enter_async_context(place.group(options.decode, *engine, sizes=sizes))
        async with serve.Router(prefill, decode, policies, turns, options.by_layer).running() as router:
            yield router


async def ask(client: httpx.AsyncClient, prompt: bytes, came: asyncio.Queue[float]) -> str:
    asked = {"prompt": prompt.decode(), "max_tokens": COUNT, "stream": True, "temperature": 0}
    parts = []
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for line in response.raise_for_status().aiter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                came.put_nowait(time.monotonic())
    return "".join(parts)


async def disturb(router: serve.Router, came: asyncio.Queue[float]) -> None:
    """Kill an engine in the middle of its requests, flip two roles, then move the requests of one engine to others."""

    async def wait(tokens: int) -> None:
        for _ in range(tokens):
            await came.get()

    await wait(100)
    busiest = max(router.up("decode"), key=lambda member: len(member.under_way))
    os.kill((await busiest.engine.counts()).pid, signal.SIGKILL)
    await wait(100)
    if router.members[0].role == "prefill":
        router.assign(0, "decode")
        await router.drain(len(router.members) - 1, "prefill")


async def drive(router: serve.Router, url: str, model: str, weights: Weights | None) -> None:
    rng, source, came = random.Random(0), text(), asyncio.Queue[float]()
    begins, ends = ([rng.randrange(len(source) - size) for _ in range(PROMPTS)] for size in (96, 48))
    # Eight beginnings, each with eight different ends.
    prompts = [source[begins[i % 8] :][:96] + source[ends[i] :][: rng.randrange(8, 49, 8)] for i in range(PROMPTS)]
    expected = await asyncio.to_thread(greedy, make_model(model, weights), prompts, COUNT)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        tasks.create_task(disturb(router, came))
        texts = await asyncio.gather(*(ask(client, prompt, came) for prompt in prompts))
        print(f"  tokens                  {PROMPTS * COUNT / (time.monotonic() - began):.0f}/s")
    counts = [await member.engine.counts() for member in router.members]
    prompt, hit, messages, size = map(sum, zip(*(count[-4:] for count in counts), strict=True))
    print(f"  known beginnings        {hit / prompt:.0%} of {prompt} prompt tokens")
    print(f"  keys and values         {messages} messages, {size} bytes")
    print(f"  resumed after the kill  {router.resumed}\n  moved in mid-text       {router.moved}")
    wrong = sum(map(str.__ne__, texts, (tokens.decode(errors="replace") for tokens in expected)))
    assert wrong == 0, f"{wrong} completions differ from those of one process"
    while any(count.sequences or count.pages_in_use for count in counts):
        counts = [await member.engine.counts() for member in router.members]
    print(f"{PROMPTS} completions are those of one process, and no engine has anything of them any more")


async def main(options: SimpleNamespace) -> None:
    weights, opened = None, asyncio.get_running_loop().create_future()
    if options.model == "bytes":
        print(f"training a model: {options.steps} steps ...", flush=True)
        weights = await asyncio.to_thread(train, options.steps)

    @asynccontextmanager
    async def actors(rt: aiodaft.Runtime) -> AsyncGenerator[serve.Router]:
        async with open_router(rt, options, weights) as router:
            opened.set_result(router)
            yield router

    with socket.create_server(("127.0.0.1", options.port if options.serve else 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(serve.app(actors, options.model), log_level="warning", lifespan="on"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            if not options.serve:
                await drive(await opened, f"http://127.0.0.1:{listener.getsockname()[1]}", options.model, weights)
                server.should_exit = True


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser, sizes = argparse.ArgumentParser(), serve.Sizes()
    parser.add_argument("--serve", action="store_true", help="serve on 127.0.0.1 until Ctrl-C")
    for name, default, about in (
        ("port", 8000, "of the server"),
        ("prefill", 2, "engines that prefill; 0: the others do both"),
        ("decode", 2, "engines that decode"),
        ("quantum", math.inf, "tokens of a tenant's turn; see docs/serving.md"),
        ("queue", 64, "prompts that may wait; more are answered with 503"),
        ("pages", sizes.pages, "of an engine's memory, 16 tokens each"),
        ("places", sizes.places, "sequences of an engine at a time"),
        ("chunk", sizes.chunk, "tokens of a prompt in one step"),
        ("steps", 300, "of training"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=about)
    parser.add_argument("--together", action="store_true", help="each engine that decodes with one that prefills")
    parser.add_argument("--by-layer", action="store_true", help="move keys and values layer by layer")
    parser.add_argument("--prefill-policy", choices=POLICIES, default="prefix_locality")
    parser.add_argument("--decode-policy", choices=POLICIES, default="two_choices")
    parser.add_argument("--model", default="bytes", help="or a class of transformers, such as LlamaForCausalLM")
    return parser.parse_args(arguments, SimpleNamespace())


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        aiodaft.run(main(options_of()))
