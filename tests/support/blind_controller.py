"""A program that sees no GPU, with actors that have one: tests run it as a script, with CUDA_VISIBLE_DEVICES=""."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import torch
from cuda_actors import GpuKeeper

import aiodaft
from aiodaft_transport import Unreachable

SIZE = 1 << 18


async def main() -> dict[str, Any]:
    """The results of CUDA tensors here."""
    async with aiodaft.Runtime(gpus=1, share_gpus=True) as rt:
        a, b = [await rt.on(gpus=0.5).spawn(GpuKeeper) for _ in range(2)]
        ref = a.make(SIZE, 2.0)
        try:
            await ref
        except Unreachable as error:
            refusal = [str(error), *error.__notes__]
        through_host = await a.make_for_the_host(SIZE, 3.0)
        return {
            "visible": torch.cuda.device_count(),
            "refusal": refusal,
            "between actors": (await b.where(ref))[2],
            "through the host": (through_host.device.type, float(through_host.sum())),
            "to an actor": (await b.where(b.echo(through_host)))[0],
            "into": float((await a.make_for_the_host(SIZE, 4.0).into(torch.zeros(SIZE))).sum()),
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
