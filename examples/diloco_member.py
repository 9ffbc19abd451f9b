"""The members of `diloco.py`: inner steps by AdamW on parameters of their own, outer steps on those that all share."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from byte_gpt import Stage, batches
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aiodaft

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """The plan by which members train.

    Attributes:
        inner_steps: Inner steps between two outer steps of the same parameters: H of the papers.
        fragments: Parts of the parameters, which have their outer steps in turn: P.
        overlap: Inner steps of which a member does not wait for the average of the others: tau.
        keep: The share of its own parameters that a member keeps when it takes the shared ones: alpha.
        lr: The learning rate of outer steps.
        momentum: Their momentum, which is Nesterov's.
        batch: Sequences of a member in one inner step.
    """

    inner_steps: int = 10
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    batch: int = 4

    @property
    def steps(self) -> int:
        """Inner steps from one outer step to the next one, of any fragment."""
        return self.inner_steps // self.fragments


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


class Member(aiodaft.Actor):
    """A replica. Its methods run one after another on the actor's thread, in the order of the calls."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        self.plan, self.model = plan, Stage(0, 1)
        self.inner = adamw(self.model)
        own = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(own, self.model.parameters())  # from now on, they lie in `own`
        self.own = own.tensor_split(plan.fragments)
        self.shared = [fragment.clone() for fragment in self.own]
        self.outer = torch.optim.SGD(self.shared, plan.lr, plan.momentum, nesterov=plan.momentum > 0)

    @aiodaft.method
    def train(self, steps: range) -> None:
        """Inner steps, by these numbers."""
        for step in steps:
            learn(self.model, self.inner, batch_of(self.plan, step, aiodaft.current_group().rank))

    @aiodaft.method
    def change(self, fragment: int) -> Tensor:
        """The pseudo-gradient: from the parameters of this member to the shared ones."""
        return self.shared[fragment] - self.own[fragment]

    @aiodaft.method
    def take(self, changes: Tensor, count: int, fragment: int) -> str:
        """The outer step by the sum of the changes of `count` members; returns the digest of the shared parameters."""
        self.shared[fragment].grad = changes / count
        self.outer.step()  # of this fragment: the others have no gradient
        self.outer.zero_grad()
        self.own[fragment].lerp_(self.shared[fragment], 1 - self.plan.keep)
        return self.digest()

    def digest(self) -> str:
        momenta = [self.outer.state[fragment].get("momentum_buffer") for fragment in self.shared]
        tensors = [*self.shared, *(momentum for momentum in momenta if momentum is not None)]
        return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()

    @aiodaft.method
    def state(self) -> tuple[list[Tensor], dict[str, Any]]:
        return self.shared, self.outer.state_dict()

    @aiodaft.method
    def join(self, state: tuple[list[Tensor], dict[str, Any]]) -> None:
        """Begin with the shared parameters of the others; the state of the inner optimizer is this member's own."""
        shared, outer = state
        self.outer.load_state_dict(outer)
        for mine, own, theirs in zip(self.shared, self.own, shared, strict=True):
            own.copy_(mine.copy_(theirs))

    @aiodaft.method
    def evaluate(self) -> float:
        model = Stage(0, 1)
        vector_to_parameters(torch.cat(self.shared), model.parameters())
        return evaluate(model)

    @aiodaft.method
    async def received(self) -> int:
        """The bytes of tensors that have come from other members."""
        return aiodaft.current_runtime().traffic().payload_received
