"""An inference server: engines that prefill, engines that decode, and a router behind OpenAI's /v1/completions.

    python examples/serve_disagg.py                       # completes 64 prompts, while an engine dies and roles change
    python examples/serve_disagg.py --serve --port 8000   # until Ctrl-C
    curl -N 127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "The target list ", "max_tokens": 80, "stream": true}'

Keys and values go from engine to engine. Each engine batches its sequences, and pushes its load to the router.
"""

import argparse
import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import serve_policies
import uvicorn
from fastapi import FastAPI
from serve_batch import Sizes
from serve_drive import drive
from serve_engine import Engine
from serve_http import api
from serve_model import CONTEXT, Weights, train
from serve_pages import PAGE
from serve_policies import Turns
from serve_router import Router

import aiodaft
from aiodaft import web

POLICIES = "round_robin", "least_work", "two_choices", "prefix_locality"


@asynccontextmanager
async def open_router(rt: aiodaft.Runtime, options: SimpleNamespace, weights: Weights | None) -> AsyncGenerator[Router]:
    """The engines, and the router in front of them."""
    engine = Engine, options.model, rt.put(weights), Sizes(options.pages, options.places, options.chunk)
    policies = {"prefill": getattr(serve_policies, options.prefill_policy)}
    policies["decode"] = getattr(serve_policies, options.decode_policy)
    turns = Turns(options.quantum, options.queue)
    async with AsyncExitStack() as groups:
        prefill = await groups.enter_async_context(rt.group(options.prefill, *engine)) if options.prefill else ()
        # Placement is one argument. In one process, keys and values need not move.
        place = rt.on(with_=prefill) if options.together else rt
        decode = await groups.enter_async_context(place.group(options.decode, *engine))
        async with Router(prefill, decode, policies, turns, options.by_layer).running() as router:
            yield router


def make_app(options: SimpleNamespace, weights: Weights | None) -> FastAPI:
    @asynccontextmanager
    async def actors(rt: aiodaft.Runtime) -> AsyncGenerator[dict[str, Router]]:
        async with open_router(rt, options, weights) as router:
            yield {"router": router}

    app = FastAPI(title="serve_disagg")
    app.include_router(api)
    # Opens the runtime, cancels the work for clients that leave, and answers 503 when too many prompts wait.
    app.add_middleware(web.Ingress, actors=actors)
    return app


async def main(options: SimpleNamespace) -> None:
    weights = None
    if options.model == "bytes":
        print(f"training a model: {options.steps} steps ...", flush=True)
        weights = await asyncio.to_thread(train, options.steps)
    app = make_app(options, weights)
    if options.serve:
        await uvicorn.Server(uvicorn.Config(app, port=options.port)).serve()
    else:
        await drive(app, options.model, weights)


def positive(number: str) -> int:
    if (found := int(number)) < 1:
        raise ValueError
    return found


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="serve on 127.0.0.1 until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", type=int, default=2, help="engines that prefill; 0: the others do both")
    parser.add_argument("--decode", type=positive, default=2, help="engines that decode")
    parser.add_argument("--together", action="store_true", help="each engine that decodes with one that prefills")
    parser.add_argument("--by-layer", action="store_true", help="move keys and values layer by layer")
    parser.add_argument("--prefill-policy", choices=POLICIES, default="prefix_locality")
    parser.add_argument("--decode-policy", choices=POLICIES, default="two_choices")
    parser.add_argument(
        "--quantum", type=positive, default=math.inf, help="tokens of a tenant's turn; see docs/serving.md"
    )
    parser.add_argument("--queue", type=positive, default=64, help="prompts that may wait; more are answered with 503")
    parser.add_argument("--pages", type=positive, default=Sizes().pages, help="of an engine's memory, 16 tokens each")
    parser.add_argument("--places", type=positive, default=Sizes().places, help="sequences of an engine at a time")
    parser.add_argument("--chunk", type=positive, default=Sizes().chunk, help="tokens of a prompt in one step")
    parser.add_argument("--model", default="bytes", help="or a class of transformers, such as LlamaForCausalLM")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    options = parser.parse_args(arguments, SimpleNamespace())
    if options.pages * PAGE < CONTEXT:
        parser.error(f"--pages {options.pages} is too few: a sequence has up to {CONTEXT} tokens, {PAGE} in a page")
    return options


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        aiodaft.run(main(options_of()))
