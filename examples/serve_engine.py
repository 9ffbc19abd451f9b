"""An engine of `serve_disagg.py`: an actor that prefills prompts and decodes, as it is asked to, in one batch."""

import asyncio
import os
import platform
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from serve_batch import Batch, Load, Sizes
from serve_model import Weights, make_model
from serve_paged import PagedModel, Prefilled
from serve_pages import Sequence
from torch import Tensor

import aiodaft


class Counts(NamedTuple):
    """The state of an engine, and its work since it began."""

    pid: int
    sequences: int
    pages_in_use: int
    steps: int
    preempted: int
    prompt_tokens: int
    hit_tokens: int
    kv_messages: int
    kv_bytes: int


@dataclass(eq=False)
class Awaited(Sequence):
    """A sequence, and its results: keys and values if it exports them, then tokens."""

    results: asyncio.Queue[int | Tensor] = field(default_factory=asyncio.Queue)


class Engine(aiodaft.Actor, restart=aiodaft.Restart(intensity=10, backoff=aiodaft.Backoff(base=0.01, max=1))):
    def __init__(self, model: str, weights: Weights | None, sizes: Sizes) -> None:
        self.model, self.batch, self.steps = PagedModel(make_model(model, weights), sizes.pages), Batch(sizes), 0
        self.changed = asyncio.Event()
        self.layers: dict[str | None, dict[int, asyncio.Future[Tensor]]] = {}  # that nobody has asked for yet

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.stepping = self.loop.create_task(self.run())
        self.stepping.add_done_callback(self.end)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stepping.cancel()
        await asyncio.wait([self.stepping])

    def end(self, stepping: asyncio.Task[None]) -> None:
        if not stepping.cancelled():  # a step has failed: the sequences here go on elsewhere
            sys.exit(f"an engine ends: {stepping.exception()!r}")

    @aiodaft.method
    async def prefill(self, prompt: bytes, by_layer: str | None = None) -> Prefilled:
        """Give the next token, and the keys and values of the prompt; or have `layer` give these, by the name."""
        sequence = self.begin(Awaited(prompt, len(prompt) + 1, exports=True, by_layer=by_layer is not None))
        layers = [] if by_layer is None else [self.loop.create_future() for _ in range(self.model.layers)]
        try:
            if by_layer is None:
                kv = await sequence.results.get()
                return Prefilled(await sequence.results.get(), kv)
            self.layers[by_layer] = dict(enumerate(layers))
            for layer in layers:
                layer.set_result(await sequence.results.get())
            while self.layers[by_layer]:
                await self.changed.wait()
            return Prefilled(await sequence.results.get(), None)
        finally:
            self.leave(sequence)
            self.layers.pop(by_layer, None)
            for layer in layers:
                layer.cancel()

    @aiodaft.method
    async def layer(self, name: str, number: int) -> Tensor:
        """Give the keys and values of a layer (2, H, T, D) as soon as they are there; call `prefill` first."""
        layer = self.layers[name].pop(number)
        self.ring()
        return await layer

    @aiodaft.method(ordered=False)  # does not hold up others until its keys and values are there
    async def decode(
        self, tokens: bytes, end: int, prefilled: Prefilled | None = None, layers: list[Tensor] | None = None
    ) -> AsyncGenerator[int]:
        """Give the tokens that follow, until there are `end`; prefill first a prompt that no engine has prefilled."""
        kv = torch.stack(layers) if layers else prefilled and prefilled.kv
        if prefilled is not None:
            tokens += bytes([prefilled.token])
            yield prefilled.token
        if len(tokens) < end:
            sequence = self.begin(Awaited(tokens, end, kv))
            try:
                for _ in range(len(tokens), end):
                    yield await sequence.results.get()
            finally:
                self.leave(sequence)

    @aiodaft.method
    async def loads(self) -> AsyncGenerator[Load]:
        """Give the load now, and each time that it has changed by much."""
        while True:
            yield self.batch.load()._replace(process=(platform.node(), os.getpid()), layers=self.model.layers)
            while not self.batch.has_news:
                await self.changed.wait()

    @aiodaft.method
    async def counts(self) -> Counts:
        batch, traffic = self.batch, aiodaft.current_runtime().traffic()
        now = len(batch.waiting) + len(batch.running), batch.pages.in_use
        done = self.steps, batch.preempted, batch.prompt_tokens, batch.hit_tokens
        return Counts(os.getpid(), *now, *done, traffic.payloads_sent, traffic.payload_sent)

    def begin(self, sequence: Awaited) -> Awaited:
        self.batch.add(sequence)
        self.ring()
        return sequence

    def leave(self, sequence: Awaited) -> None:
        self.batch.drop(sequence)
        self.ring()

    def ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            while not (rows := self.batch.plan()):
                await self.changed.wait()
            tokens = await asyncio.to_thread(self.model.step, rows, self.export)
            self.steps += 1
            for row, token in zip(rows, tokens, strict=True):
                if row.sequence in self.batch.running and self.batch.advance(row, token):
                    row.sequence.results.put_nowait(token)
            self.ring()

    def export(self, sequence: Awaited, kv: Tensor) -> None:
        """Put keys and values where other processes can read them; called by the thread."""
        shared = aiodaft.memory.empty(kv.shape).copy_(kv)
        self.loop.call_soon_threadsafe(sequence.results.put_nowait, shared)
