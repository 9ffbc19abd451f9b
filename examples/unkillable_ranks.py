"""The ranks of `unkillable.py`: each has a part of the state, copies of it, and parity of the parts of the others."""

import asyncio
from concurrent.futures import Future
from functools import reduce

import torch
from byte_gpt import Stage
from dp_ranks import Batch, adam, loss_of
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aiodaft


def rows_of(state: Tensor, rank: int, ranks: int, width: int) -> Tensor:
    """The bits of a part, a row for each rank. Row `rank` is zero: a part and parity of it are never in one process."""
    bits = torch.zeros((ranks - 1) * width, dtype=torch.int32)
    bits[: len(state)] = state.view(torch.int32)
    before, after = bits.view(-1, width).tensor_split([rank])
    return torch.cat([before, torch.zeros(1, width, dtype=torch.int32), after])


def state_of(rows: Tensor, rank: int, length: int) -> Tensor:
    return torch.cat([rows[:rank], rows[rank + 1 :]]).flatten()[:length].view(torch.float32)


class Rank(aiodaft.Actor):
    """A spare until it is told which rank it is."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        self.model = self.make_model()
        self.took_over: Future[None] = Future()
        self.begin(0, 2)

    def begin(self, rank: int, ranks: int) -> None:
        """Have the state of this rank before the first step: one tensor of parameters, both moments of Adam, steps."""
        parts = parameters_to_vector(self.make_model().parameters()).detach().tensor_split(ranks)
        self.rank, self.ranks = rank, ranks
        self.width = -(-(3 * len(parts[0]) + 1) // (ranks - 1))  # the first part is the longest
        self.state = torch.cat([parts[rank], torch.zeros(2 * len(parts[rank]) + 1)])
        self.parameters, average, square = self.state[:-1].view(3, -1)
        self.optimizer = adam([self.parameters])
        self.optimizer.state[self.parameters] = {"step": self.state[-1], "exp_avg": average, "exp_avg_sq": square}
        self.copies, self.parities = dict[int, Tensor](), dict[int, Tensor]()

    def make_model(self) -> nn.Module:
        return Stage(0, 1)

    def rows(self) -> Tensor:
        return rows_of(self.state, self.rank, self.ranks, self.width)

    @aiodaft.method
    def part(self) -> Tensor:
        return self.parameters

    @aiodaft.method
    def gradient(self, parts: list[Tensor], batch: Batch, tokens: int) -> Tensor:
        vector_to_parameters(torch.cat(parts), self.model.parameters())
        loss = loss_of(self.model(batch[0]), batch[1], tokens)
        self.loss = loss.item()
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    @aiodaft.method
    def update(self, gradient: Tensor) -> float:
        self.parameters.grad = gradient
        self.optimizer.step()
        return self.loss

    @aiodaft.method
    def copy(self, step: int) -> Tensor:
        """The first half of a checkpoint. The one before stays, until this one is whole everywhere."""
        self.copies = {step: self.state.clone()} | {old: copy for old, copy in self.copies.items() if old >= step - 1}
        return self.rows()

    @aiodaft.method(ordered=False)  # the calls of the next step do not wait for this one's argument
    async def keep(self, parity: Tensor, step: int) -> None:
        self.parities = {step: parity} | {old: kept for old, kept in self.parities.items() if old >= step - 1}

    @aiodaft.method
    def roll_back(self, rank: int, ranks: int, step: int) -> Tensor:
        """Go back to a checkpoint; 0 is the beginning. Returns this rank's knowledge of the parts of others."""
        if step == 0:
            self.begin(rank, ranks)
            return self.rows()
        self.state.copy_(self.copies[step])
        rows = self.rows()
        rows[self.rank] = self.parities[step]
        return rows

    @aiodaft.method
    def take_over(self, rank: int, ranks: int, step: int, rows: list[Tensor]) -> None:
        """Be the rank that died: the combined knowledge of the others is the rows of its part and its parity."""
        self.begin(rank, ranks)
        if step > 0:
            lost = reduce(torch.bitwise_xor, rows)
            self.state.copy_(state_of(lost, rank, len(self.state)))
            self.copies[step], self.parities[step] = self.state.clone(), lost[rank].clone()
        self.took_over.set_result(None)

    @aiodaft.method
    async def stand_by(self) -> None:
        await asyncio.wrap_future(self.took_over)
