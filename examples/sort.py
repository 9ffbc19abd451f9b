"""Sorts numbers that no process has room for alone: maps cut them by value, reduces merge the parts of one range.

    python examples/sort.py --mib 1024 --parts 16

The parts go from worker to worker; the controller sees none of them.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from time import perf_counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import aiodaft

Numbers: TypeAlias = NDArray[np.uint32]


def cut(seed: int, count: int, parts: int) -> list[Numbers]:
    """A map: make numbers, and give them as parts by value."""
    numbers = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    numbers.sort()
    bounds = np.arange(1, parts) * ((1 << 32) // parts)
    return np.split(numbers, np.searchsorted(numbers, bounds))


def merge(parts: list[Numbers]) -> Numbers:
    """A reduce: sort the parts of all maps with the same range of values."""
    merged = np.concatenate(parts)
    merged.sort(kind="stable")
    return merged


def look(part: Numbers) -> tuple[int, int, int, int, bool]:
    """The count, the sum, the least and the greatest number of a part, and whether it is sorted."""
    return len(part), int(part.sum(dtype=np.uint64)), int(part[0]), int(part[-1]), bool((part[:-1] <= part[1:]).all())


def total(parts: list[Numbers]) -> tuple[int, int]:
    return sum(map(len, parts)), sum(int(part.sum(dtype=np.uint64)) for part in parts)


async def main(mib: int, parts: int, workers: int) -> None:
    async with aiodaft.Runtime() as rt, rt.pool(workers) as pool:
        began = perf_counter()
        maps = [pool.submit(cut, seed, mib * (1 << 20) // 4 // parts, parts) for seed in range(parts)]
        totals = [pool.submit(total, ref) for ref in maps]
        rows = [ref.parts(parts) for ref in maps]
        reduces = [pool.submit(merge, list(column)) for column in zip(*rows, strict=True)]
        del maps, rows
        await asyncio.gather(*(ref.ready() for ref in reduces))
        seconds = perf_counter() - began
        found = await asyncio.gather(*(pool.submit(look, ref) for ref in reduces))
        expected = [sum(column) for column in zip(*await asyncio.gather(*totals), strict=True)]

        ascending = all(low[3] <= high[2] for low, high in pairwise(found))
        print(f"sorted: {ascending and all(part[4] for part in found)}")
        print(f"nothing is lost: {[sum(part[0] for part in found), sum(part[1] for part in found)] == expected}")
        print(f"the controller: {rt.traffic().payload} payload bytes")
        print(f"{mib} MiB in {parts} x {parts} parts: {seconds:.2f} s, {mib / seconds:.0f} MiB/s")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--mib", type=int, default=64)
    options.add_argument("--parts", type=int, default=16)
    options.add_argument("--workers", type=int, default=2)
    aiodaft.run(main(**vars(options.parse_args())))
