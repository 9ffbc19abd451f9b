"""The ranks of `pipeline_gpt.py`: actors that have stages of the model, and their common part with one process."""

import torch
from byte_gpt import Stage
from torch import Tensor, nn

import aiodaft


def loss_of(logits_BLV: Tensor, y_BL: Tensor, microbatches: int) -> Tensor:
    return nn.functional.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten()) / microbatches


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def add(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(some, others, strict=True)]


def update(optimizer: torch.optim.Optimizer, model: nn.Module, total: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient
    optimizer.step()


class Rank(aiodaft.Actor):
    def __init__(self, stages: list[int], of: int, microbatches: int, split: bool) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        self.stages = {stage: Stage(stage, of) for stage in stages}
        self.model = nn.ModuleList(self.stages.values())
        self.optimizer = adam(self.model)
        self.microbatches, self.split, self.replicas = microbatches, split, aiodaft.current_group()

    @aiodaft.method
    def start(self, batch: tuple[Tensor, Tensor] | None) -> None:
        mine = [part.chunk(self.replicas.size)[self.replicas.rank] for part in batch or ()]
        self.xs, self.ys = [part.chunk(self.microbatches) for part in mine] or ((), ())
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self.loss = 0.0
        self.optimizer.zero_grad()

    @aiodaft.method
    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        x = self.xs[microbatch] if x is None else x.requires_grad_()
        y = self.stages[stage](x)
        if self.stages[stage].last:
            y = loss_of(y, self.ys[microbatch], self.microbatches * self.replicas.size)
            self.loss += y.item()
        self.saved[stage, microbatch] = x, y, None
        return None if self.stages[stage].last else y.detach()

    @aiodaft.method
    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x, y, _ = self.saved.pop((stage, microbatch))
        if not self.split:
            y.backward(gradient)
            return x.grad
        self.saved[stage, microbatch] = x, y, gradient
        return None if self.stages[stage].first else torch.autograd.grad(y, x, gradient, retain_graph=True)[0]

    @aiodaft.method
    def weights(self, stage: int, microbatch: int) -> None:
        # Goes through the stage's activations once more; kernels that save them in `backward` need not.
        _, y, gradient = self.saved.pop((stage, microbatch))
        y.backward(gradient, inputs=list(self.stages[stage].parameters()))

    @aiodaft.method
    def finish(self, done: list[None]) -> list[Tensor]:
        return gradients(self.model)

    @aiodaft.method
    def learn(self, total: list[Tensor]) -> float:
        update(self.optimizer, self.model, total)
        return self.loss

    @aiodaft.method
    def parameters(self) -> dict[int, list[Tensor]]:
        return {number: [p.detach() for p in stage.parameters()] for number, stage in self.stages.items()}
