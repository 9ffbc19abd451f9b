"""Plans that are written by hand: a step of SGD of two linear layers, on parts of them and of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten

from aiodaft.tensor.instructions import Instruction, Slot
from aiodaft.tensor.operations import Arguments, Cause, Input, Output, Results
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.specs import Meta, Spec, placed

SHAPES = {"up": (4, 7), "down": (7, 3), "x": (6, 4)}
CAUSE = Cause("aten.mm", "mlp.down", "mlp.py:7")


def batch(k: int) -> Tensor:
    return torch.linspace(-1, 1 + k, 24).view(6, 4)


def start() -> dict[str, Tensor]:
    return {"up": torch.linspace(-1, 1, 28).view(4, 7), "down": torch.linspace(1, -2, 21).view(7, 3)}


def alone(state: Mapping[str, Tensor], rates: list[float]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses and the last state of steps in one process."""
    up, down = (state[name].clone().requires_grad_() for name in ("up", "down"))
    losses = []
    for k, rate in enumerate(rates):
        loss = ((batch(k) @ up).relu() @ down).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for one in (up, down):
                assert one.grad is not None
                one -= rate * one.grad
                one.grad = None
    return losses, {"up": up.detach(), "down": down.detach()}


def mlp(axes: dict[str, int], scalars: Mapping[str, Any], extra: list[Instruction] | None = None) -> Plan:
    """`loss = (relu(x @ up) @ down).square().mean()`, and its update. `tp` cuts the layers, `dp` the rows of x.

    Args:
        axes: Of the names `dp` and `tp`.
        scalars: It has the rate.
        extra: Instructions before the last collectives.
    """
    up, down, x, rate = map(Slot, range(4))
    h, a, part, sq, gy, ga, gh, gup, gdown = map(Slot, range(10, 19))
    todo: list[Instruction] = []

    def op(target: str, out: Slot, *args: Any, **kwargs: Any) -> Slot:
        todo.append(Instruction("op", target, args, kwargs, (out.number,)))
        return out

    def reduced(axis: str, source: Slot) -> Slot:
        if axis not in axes:
            return source
        out = Slot(source.number + 100)
        todo.append(Instruction("all_reduce", axis, (source, "sum"), {}, (out.number,)))
        return out

    op("aten.mm.default", h, x, up)
    op("aten.relu.default", a, h)
    op("aten.mm.default", part, a, down)
    y = reduced("tp", part)
    op("aten.mul.Tensor", sq, y, y)
    op("aten.mul.Tensor", Slot(30), op("aten.sum.default", Slot(31), sq), 1 / 18)
    loss = reduced("dp", Slot(30))
    op("aten.mul.Tensor", gy, y, 2 / 18)
    op("aten.mm.default", gdown, op("aten.t.default", Slot(32), a), gy)
    op("aten.mm.default", ga, gy, op("aten.t.default", Slot(33), down))
    op("aten.threshold_backward.default", gh, ga, h, 0)
    op("aten.mm.default", gup, op("aten.t.default", Slot(34), x), gh)
    todo += extra or []
    gup, gdown = reduced("dp", gup), reduced("dp", gdown)
    op("aten.sub_.Tensor", Slot(40), up, gup, alpha=rate)
    op("aten.sub_.Tensor", Slot(41), down, gdown, alpha=rate)
    places = {"up": {"tp": Shard(1)}, "down": {"tp": Shard(0)}, "x": {"dp": Shard(0)}}
    specs = {}
    for slot, (name, shape) in zip((0, 1, 2), SHAPES.items(), strict=True):
        given = {axis: one for axis, one in places[name].items() if axis in axes}
        specs[slot] = Spec(placed(given, axes), Meta(shape, (shape[1], 1), torch.float32))
    specs[40], specs[41] = specs[0], specs[1]
    specs[loss.number] = Spec(tuple(Replicate() for _ in axes), Meta((), (), torch.float32))
    _, arguments = tree_flatten((torch.empty(0),))
    _, results = tree_flatten(torch.empty(0))
    return Plan(
        axes=axes,
        inputs=(
            Input(0, "up", "parameter"), Input(1, "down", "parameter"), Input(2, "x", "argument"),
            Input(3, "rate", "scalar"),
        ),
        instructions=tuple(todo),
        outputs=(Output(loss.number, "loss", "result"), Output(40, "up", "parameter"), Output(41, "down", "parameter")),
        specs=specs,
        arguments=Arguments(arguments, (("x", specs[2].meta, None),)),
        results=Results(results),
        collectives=(),
        scalars=scalars,
        causes=(CAUSE,) * len(todo),
    )  # fmt: skip
