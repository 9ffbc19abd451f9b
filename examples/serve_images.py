"""Captions for images by three pools of actors: encode, prefill, decode. Each pool has its own number of processes.

    python examples/serve_images.py            # captions 64 images, while an actor of each pool is killed
    python examples/serve_images.py --encode 4 --prefill 1 --decode 3

A caption is one chain of three calls: the encoded image, and keys and values, go from pool to pool. In the end, all
captions are compared with those of one process.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from serve_images_model import END, Captioner, Image, Prefilled, Weights, drawn, train
from torch import Tensor

import aiodaft
from aiodaft.exceptions import OutcomeUnknown

IMAGES = 64
LOSSES = 3  # of actors, for one caption


class Worker(aiodaft.Actor, restart=aiodaft.Restart(intensity=10, backoff=aiodaft.Backoff(base=0.01, max=1))):
    def __init__(self, weights: Weights) -> None:
        self.model = Captioner(weights)


class Encoder(Worker):
    @aiodaft.method(idempotent=True)  # made again by the next incarnation
    def encode(self, image: Image) -> Tensor:
        return self.model.encode(image)


class Prefiller(Worker):
    @aiodaft.method(idempotent=True)
    def prefill(self, seen: Tensor) -> Prefilled:
        return self.model.prefill(seen)


class Decoder(Worker):
    @aiodaft.method
    async def decode(self, last: Prefilled) -> AsyncGenerator[int]:
        while last.token != END:
            yield last.token
            last = await asyncio.to_thread(self.model.decode, last)


class Pools(NamedTuple):
    encoders: aiodaft.Group[Encoder]
    prefillers: aiodaft.Group[Prefiller]
    decoders: aiodaft.Group[Decoder]

    async def caption(self, image: Image) -> bytes:
        """Each call goes to the actor of its pool that has the fewest."""
        for losses in range(LOSSES + 1):
            seen = self.encoders.any(Encoder.encode, image)
            prefilled = self.prefillers.any(Prefiller.prefill, seen)
            try:
                return bytes([token async for token in self.decoders.any(Decoder.decode, prefilled)])
            except OutcomeUnknown:
                # Its keys and values died with an actor.
                if losses == LOSSES:
                    raise
        raise AssertionError

    async def captions(self, images: Sequence[Image], kill: Sequence[int] = ()) -> list[bytes]:
        """The captions; one process after the other is killed meanwhile."""
        victims = list(kill)
        async with asyncio.TaskGroup() as tasks:
            captions = [tasks.create_task(self.caption(image)) for image in images]
            for done, caption in enumerate(asyncio.as_completed(captions), 1):
                await caption
                if victims and done % 8 == 0:
                    os.kill(victims.pop(), signal.SIGKILL)
        return [caption.result() for caption in captions]


async def main(options: argparse.Namespace) -> None:
    print(f"training a model: {options.steps} steps ...", flush=True)
    weights = await asyncio.to_thread(train, options.steps)
    images, truths = zip(*(drawn(random.Random(seed)) for seed in range(IMAGES)), strict=True)
    async with aiodaft.Runtime(preload=("torch",)) as rt:
        shared = rt.put(weights)
        async with (
            rt.group(options.encode, Encoder, shared) as encoders,
            rt.group(options.prefill, Prefiller, shared) as prefillers,
            rt.group(options.decode, Decoder, shared) as decoders,
        ):
            pools = Pools(encoders, prefillers, decoders)
            victims = [pid for pool in pools if (pid := (await rt.info(pool[0])).pid)]
            began = time.monotonic()
            captions = await pools.captions(images, victims)
            seconds = time.monotonic() - began
    alone = Captioner(weights)
    assert captions == [alone.caption(image) for image in images]
    right = sum(caption + b"\n" == truth for caption, truth in zip(captions, truths, strict=True))
    rate = len(captions) / seconds
    print(f"{len(captions)} captions are those of one process; {rate:.0f} a second, with a kill in each pool")
    print(f"{right} are right, such as: {captions[0].decode()}")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for pool in ("encode", "prefill", "decode"):
        parser.add_argument(f"--{pool}", type=int, default=2, help=f"actors that {pool}")
    parser.add_argument("--steps", type=int, default=250, help="of training")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    aiodaft.run(main(options_of()))
