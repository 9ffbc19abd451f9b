"""The variants of `diloco.py` as data, the inner steps, and the bytes that each variant takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from byte_gpt import Stage, batches
from torch import Tensor, nn

from aiodaft.tensor.aggregation import Codec, Encoder, Int8, Ternary, TopK

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """The plan by which members train.

    Attributes:
        inner_steps: Inner steps between two outer steps of the same parameters: H of the papers.
        fragments: Parts of the parameters, which have their outer steps in turn: P.
        moments: The outer steps after which members average the first and the second moments of AdamW, too, as DES-LOC
            does; none: they keep their own.
        overlap: Inner steps of which a member does not wait for the average of the others: tau.
        eager: Whether the average comes an outer step later, and a member goes on with its own share meanwhile.
        keep: The share of its own parameters that a member keeps when it takes the shared ones: alpha.
        lr: The learning rate of outer steps.
        momentum: Their momentum, which is Nesterov's.
        batch: Sequences of a member in one inner step.
        codec: Makes changes shorter.
    """

    inner_steps: int = 10
    fragments: int = 1
    moments: tuple[int, ...] = ()
    overlap: int = 0
    eager: bool = False
    keep: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    batch: int = 4
    codec: Codec | None = None

    @property
    def steps(self) -> int:
        """Inner steps from one outer step to the next one, of any fragment."""
        return self.inner_steps // self.fragments

    def due(self, step: int) -> tuple[int, ...]:
        """The vectors of an outer step: the fragments come first, then the moments."""
        moments = (index for index, every in enumerate(self.moments, self.fragments) if (step + 1) % every == 0)
        return step % self.fragments, *moments


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x_BL, y_BL = batch
    return nn.functional.cross_entropy(model(x_BL).flatten(0, 1), y_BL.flatten())


def batch_of(plan: Plan, step: int, rank: int) -> Batch:
    """The batch that a member learns from in an inner step."""
    return next(batches(plan.batch, 1, f"{step}/{rank}"))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """The loss on a batch that is no member's."""
    return loss_of(model, next(batches(64, 1, "evaluation"))).item()


def lengths_of(plan: Plan) -> Sequence[int]:
    """The lengths of the vectors that members share."""
    parameters = torch.empty(sum(parameter.numel() for parameter in Stage(0, 1).parameters()))
    return [*map(len, parameters.tensor_split(plan.fragments)), *[len(parameters)] * len(plan.moments)]


def bytes_of(plan: Plan, members: int, steps: int) -> int:
    """The bytes that members receive from each other in the first outer steps, if none dies or joins."""
    lengths = lengths_of(plan)
    due = [lengths[index] for step in range(steps) for index in plan.due(step)]
    if plan.codec is None:
        # An all-reduce of n bytes takes 2 (K - 1) n: all values go to where they are added, and the sum goes back.
        return 2 * (members - 1) * 4 * sum(due)
    codec = plan.codec
    # Each member gets the codes of all others.
    return members * (members - 1) * sum(Encoder(codec).encode(torch.zeros(length)).nbytes for length in due)


def data_parallel(plan: Plan, members: int, steps: int) -> tuple[float, int]:
    """The loss if all members take each inner step together, here in one process; and its bytes."""
    torch.set_num_threads(1)
    model = Stage(0, 1)
    optimizer = adamw(model)
    for step in range(steps):
        parts = zip(*(batch_of(plan, step, rank) for rank in range(members)), strict=True)
        x_BL, y_BL = map(torch.cat, parts)
        learn(model, optimizer, (x_BL, y_BL))
    return evaluate(model), bytes_of(Plan(), members, steps)


# After 12 outer steps, the momentum of the papers, 0.9, is not better yet.
PLANS = {
    "diloco": Plan(lr=1.0, momentum=0.5),
    "streaming": Plan(fragments=5, overlap=1, keep=0.5),
    "eager": Plan(lr=1.0, momentum=0.3, eager=True),
    "desloc": Plan(lr=1.0, momentum=0.0, moments=(3, 6)),
}
CODECS = {"none": None, "int8": Int8(), "topk": TopK(0.25), "ternary": Ternary()}
