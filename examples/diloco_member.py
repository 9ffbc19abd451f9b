"""The members of `diloco.py`: inner steps by AdamW on vectors of their own, outer steps on those that all share."""

import hashlib
from collections.abc import Iterator

import torch
from byte_gpt import Stage
from diloco_plan import Plan, adamw, batch_of, evaluate, learn
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aiodaft
from aiodaft.tensor.aggregation import Code, Encoder, total

Change = Tensor | list[Code]
# The shared vectors, the momenta of the outer steps, and the inner steps that the moments are of.
State = tuple[list[Tensor], list[Tensor | None], float]


def add_up(changes: list[list[Code]]) -> Tensor:
    """The sum of the changes of all members."""
    return torch.cat([total(codes) for codes in zip(*changes, strict=True)])


class Member(aiodaft.Actor):
    """A replica. Its methods run one after another on the actor's thread, in the order of the calls."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        self.plan, self.model = plan, Stage(0, 1)
        self.inner = adamw(self.model)
        own = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(own, self.model.parameters())  # from now on, they lie in `own`
        self.own = [*own.tensor_split(plan.fragments), *self._moments(own)]
        self.shared = [vector.clone() for vector in self.own]
        # The vectors from which the inner steps began, and the changes of the last ones.
        self.begun, self.last = [vector.clone() for vector in self.own], [torch.zeros_like(one) for one in self.own]
        self.encoders = [Encoder(plan.codec) for _ in self.own] if plan.codec is not None else []
        self.outer = torch.optim.SGD(self.shared, plan.lr, plan.momentum, nesterov=plan.momentum > 0)

    def _moments(self, parameters: Tensor) -> Iterator[Tensor]:
        """Vectors in which the moments of AdamW lie from now on, if they are shared."""
        shapes = list(self.model.parameters())
        for name in ("exp_avg", "exp_avg_sq")[: len(self.plan.moments)]:
            yield (vector := torch.zeros_like(parameters))
            for shape, view in zip(shapes, vector.split([one.numel() for one in shapes]), strict=True):
                self.inner.state[shape] |= {"step": torch.tensor(0.0), name: view.view_as(shape)}

    @aiodaft.method
    def train(self, steps: range) -> None:
        """Inner steps, by these numbers."""
        for step in steps:
            learn(self.model, self.inner, batch_of(self.plan, step, aiodaft.current_group().rank))

    @aiodaft.method
    def change(self, due: tuple[int, ...]) -> Change:
        """The pseudo-gradient of some vectors: from those of this member to the shared ones."""
        for index in due:
            self.last[index] = (self.begun if self.plan.eager else self.shared)[index] - self.own[index]
            self.begun[index].copy_(self.own[index])
        if self.encoders:
            return [self.encoders[index].encode(self.last[index]) for index in due]
        return torch.cat([self.last[index] for index in due])

    @aiodaft.method
    def take(self, changes: Tensor, count: int, due: tuple[int, ...]) -> str:
        """The outer step by the sum of the changes of `count` members; returns the digest of the shared vectors."""
        for index, change in zip(due, changes.split([len(self.shared[index]) for index in due]), strict=True):
            self.shared[index].grad = change / count
        self.outer.step()  # of these vectors: the others have no gradient
        self.outer.zero_grad()
        for index in due:
            self.own[index].lerp_(self.shared[index], 1 - self.plan.keep)
            if index > self.plan.fragments:
                self.own[index].clamp_(min=0.0)  # second moments, of which a codec may have made negative ones
            if self.plan.eager:
                # The inner steps that this change does not have: of the member's own ones, its share counts at once.
                self.own[index].sub_(self.last[index], alpha=self.plan.lr / count)
                self.begun[index].copy_(self.own[index])
        return self.digest()

    def digest(self) -> str:
        tensors = [*self.shared, *(momentum for momentum in self._momenta() if momentum is not None)]
        return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()

    def _momenta(self) -> list[Tensor | None]:
        return [self.outer.state[vector].get("momentum_buffer") for vector in self.shared]

    def _clocks(self) -> list[Tensor]:
        """The numbers of inner steps, if the moments are shared."""
        return [state["step"] for state in self.inner.state.values()] if self.plan.moments else []

    @aiodaft.method
    def state(self) -> State:
        return self.shared, self._momenta(), max((clock.item() for clock in self._clocks()), default=0.0)

    @aiodaft.method
    def join(self, state: State) -> None:
        """Begin with the vectors that all share; moments that are not shared begin anew."""
        shared, momenta, step = state
        for index, (vector, momentum) in enumerate(zip(shared, momenta, strict=True)):
            self.begun[index].copy_(self.own[index].copy_(self.shared[index].copy_(vector)))
            self.outer.state[self.shared[index]]["momentum_buffer"] = None if momentum is None else momentum.clone()
        for clock in self._clocks():
            clock.fill_(step)

    @aiodaft.method
    def evaluate(self) -> float:
        model = Stage(0, 1)
        vector_to_parameters(torch.cat(self.shared[: self.plan.fragments]), model.parameters())
        return evaluate(model)

    @aiodaft.method
    async def received(self) -> int:
        """The bytes of tensors that have come from other members."""
        return aiodaft.current_runtime().traffic().payload_received
