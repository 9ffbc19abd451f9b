"""A farm of DataLoaders: actors, also on other machines, prepare batches ahead of a trainer, which takes them in order.

    python examples/data_farm.py --loaders 4 --batches 64

Each loader has its part of the dataset; batches go from loader to trainer, and wait in shared memory meanwhile.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import aiodaft


class Pictures(Dataset[Tensor]):
    """Pictures that take work to make."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        picture = torch.full((3, 64, 64), float(index))
        for _ in range(10):
            picture = torch.nn.functional.avg_pool2d(picture[None], 3, 1, 1, count_include_pad=False)[0]
        return picture


class Loader(aiodaft.Actor):
    """Makes the batches of its rank, ahead of the calls that take them."""

    def __init__(self, count: int, batch: int) -> None:
        torch.set_num_threads(1)
        group, data = aiodaft.current_group(), Pictures(count)
        sampler = DistributedSampler[Tensor](data, group.size, group.rank, shuffle=False)
        self.batches: Iterator[Tensor] = iter(DataLoader(data, batch, sampler=sampler))

    @aiodaft.method
    def batch(self) -> Tensor:
        return next(self.batches)


class Trainer(aiodaft.Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @aiodaft.method
    def train(self, batch: Tensor) -> float:
        """A step; the first pixels say which pictures it had."""
        self.seen += [round(float(picture[0, 0, 0])) for picture in batch]
        return float(batch.mean())

    @aiodaft.method
    def pictures(self) -> list[int]:
        return self.seen


async def main(loaders: int, batches: int, batch: int, ahead: int) -> None:
    batches -= batches % loaders
    async with (
        aiodaft.Runtime() as rt,
        rt.group(loaders, Loader, batches * batch, batch) as farm,
        rt.spawn(Trainer) as trainer,
    ):
        began = perf_counter()
        # The next batches are being made while the trainer trains.
        made = deque(farm[number % loaders].batch() for number in range(min(ahead * loaders, batches)))
        for number in range(ahead * loaders, batches + ahead * loaders):
            loss = trainer.train(made.popleft())
            if number < batches:
                made.append(farm[number % loaders].batch())
            await loss
        seconds = perf_counter() - began
        seen = await trainer.pictures()
        print(f"each of {len(seen)} pictures was seen once: {sorted(seen) == list(range(batches * batch))}")
        print(f"the controller: {rt.traffic().payload} payload bytes")
        print(f"{len(seen) / seconds:.0f} pictures/s with {loaders} loaders")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--loaders", type=int, default=2)
    options.add_argument("--batches", type=int, default=32)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--ahead", type=int, default=2)
    aiodaft.run(main(**vars(options.parse_args())))
