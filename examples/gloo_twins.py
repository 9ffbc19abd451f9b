"""Processes that use torch.distributed with gloo by themselves, in the ways that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import aiodaft

# The timeout of calls that would wait for ever without one.
_TIME = timedelta(seconds=1)


class Twin(aiodaft.Actor):
    """One process. Each method uses a process group of its own."""

    def _open(self, path: str) -> int:
        """Open the default process group; returns the rank."""
        group = aiodaft.current_group()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store: dist.Store = dist.FileStore(path, group.size)  # type: ignore[attr-defined]  # it is there
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=_TIME)
        return group.rank

    @aiodaft.method
    def opposite_orders(self, path: str) -> tuple[float, float]:
        """All-reduce a loss and a gradient, each rank in an order of its own."""
        rank = self._open(path)
        loss, gradient = torch.tensor([1.0 + rank]), torch.tensor([100.0 * (rank + 1)])
        for value in (loss, gradient) if rank == 0 else (gradient, loss):
            dist.all_reduce(value)
        return loss.item(), gradient.item()

    @aiodaft.method
    def different_shapes(self, path: str) -> list[float]:
        value = torch.ones(10 if self._open(path) else 6)
        dist.all_reduce(value)
        return value.tolist()

    @aiodaft.method
    def overlapping_groups(self, path: str) -> None:
        """Three groups of two of three ranks: each rank begins with the one that the next rank ends with."""
        rank = self._open(path)
        groups = [dist.new_group([first, (first + 1) % 3], timeout=_TIME) for first in range(3)]
        for number in (rank, (rank - 1) % 3):
            dist.all_reduce(torch.ones(1), group=groups[number])

    @aiodaft.method
    def both_send_first(self, path: str) -> None:
        other = 1 - self._open(path)
        dist.send(torch.ones(1000), other)
        dist.recv(torch.zeros(1000), other)

    @aiodaft.method
    def too_little_room(self, path: str) -> None:
        """Ten numbers are sent, and six received."""
        if self._open(path) == 0:
            dist.send(torch.ones(10), 1)
        else:
            dist.recv(torch.zeros(6), 0)

    @aiodaft.method
    def a_peer_dies(self, path: str) -> int:
        """Reduce, lose rank 1, and try twice again; the number of times that it worked."""
        rank = self._open(path)
        worked = 0
        for turn in range(3):
            if turn == 1 and rank == 1:
                os._exit(1)
            worked += _works(lambda: dist.all_reduce(torch.ones(1)))
        return worked

    @aiodaft.method
    def stuck_pipeline(self, path: str) -> None:
        """Stages 0 and 2 are at rank 0, stage 1 is at rank 1; each runs the first task of its schedule."""
        microbatch = torch.ones(1000)
        if self._open(path) == 0:
            # 0SEND_F1, 2RECV_F0
            dist.send(microbatch, 1, tag=1)
            dist.recv(microbatch, 1, tag=0)
        else:
            # 1SEND_F0, 1RECV_F1
            dist.send(microbatch, 0, tag=0)
            dist.recv(microbatch, 0, tag=1)


def _works(collective: Callable[[], Tensor | None]) -> bool:
    try:
        collective()
    except RuntimeError:
        return False
    return True
