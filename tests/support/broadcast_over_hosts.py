"""A program with an actor that makes a large value on one node, and consumers on others: their names are arguments."""

from __future__ import annotations

import asyncio
import sys

from relay_actors import Sink, Source, digest, made

import aiodaft


async def main(address: str, key_file: str, nbytes: int, first: str, *others: str) -> None:
    """Have three actors on each of the other nodes read the value."""
    async with aiodaft.Runtime(address, key_file=key_file) as rt:
        source = await rt.on(node=first).spawn(Source)
        sinks = [await rt.on(node=name).spawn(Sink) for name in others for _ in range(3)]
        ref = source.make(nbytes)
        found = await asyncio.gather(*(sink.take(ref) for sink in sinks))
        assert set(found) == {digest(made(nbytes))}


if __name__ == "__main__":
    aiodaft.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
