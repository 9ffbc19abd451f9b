"""One program under many strategies: losses and parameters of one process, and the collectives of each strategy."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from lockstep import run_whole
from tiny_gpt import GPT, batches, train
from torch.distributed.tensor import Shard

from aiodaft.tensor.capturing import capture
from aiodaft.tensor.planner import Planner
from aiodaft.tensor.program import Program
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.strategy import Strategy

TP = {
    "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
    "blocks.*.attn.out.weight": {"tp": Shard(1)},
    "blocks.*.up.*": {"tp": Shard(0)},
    "blocks.*.down.weight": {"tp": Shard(1)},
}
BATCH = {"*": {"dp": Shard(0)}}
STRATEGIES: dict[str, tuple[Strategy, dict[str, int]]] = {
    "dp": (Strategy(inputs=BATCH), {"dp": 2}),
    "dp, a batch that three ranks do not divide": (Strategy(inputs=BATCH), {"dp": 3}),
    "zero1": (Strategy(inputs=BATCH, optimizer={"*": {"dp": Shard(0)}}), {"dp": 2}),
    "zero3": (
        Strategy(inputs=BATCH, params={"*": {"dp": Shard(0)}}, use={"*": {}}),
        {"dp": 2},
    ),
    "zero3, uneven": (
        Strategy(inputs=BATCH, params={"*": {"dp": Shard(0)}}, use={"*": {}}),
        {"dp": 3},
    ),
    "tp": (Strategy(params=TP), {"tp": 2}),
    "dp x tp": (Strategy(params=TP, inputs=BATCH), {"dp": 2, "tp": 2}),
    "the vocabulary in parts": (
        Strategy(params={**TP, "tok.weight": {"tp": Shard(0)}, "head.weight": {"tp": Shard(0)}}),
        {"tp": 2},
    ),
}


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


@pytest.fixture(scope="module")
def program(model: GPT) -> Program:
    x, y = next(batches(1))
    return capture(train, model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y)


@pytest.fixture(scope="module")
def alone(model: GPT) -> tuple[list[float], dict[str, Any]]:
    here = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(here.parameters(), lr=1e-2)
    losses = [train(here, optimizer, x, y).item() for x, y in batches(3)]
    return losses, here.state_dict()


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_strategy_gives_the_losses_of_one_process(
    name: str, model: GPT, program: Program, alone: tuple[list[float], dict[str, Any]]
) -> None:
    strategy, axes = STRATEGIES[name]
    plan = Planner(program, strategy, Rules(axes)).made()
    values = {**program.values(model.state_dict()), **program.scalars}
    losses = []
    for x, y in batches(3):
        made = run_whole(plan, {**values, **program.arguments.bind(x, y)})
        results = [made.pop(one.name) for one in plan.outputs if one.role == "result"]
        losses.append(results[0].item())
        values |= made
        values["random.step"] += 1
    assert losses == pytest.approx(alone[0], abs=1e-5)
    for parameter, value in alone[1].items():
        if parameter.endswith(".k.bias"):
            continue  # Softmax does not depend on it: AdamW makes steps of the noise of its gradient.
        torch.testing.assert_close(values[parameter], value, atol=1e-4, rtol=0)


def test_tensor_parallel_layers_need_two_all_reduces_forward_and_two_backward(program: Program) -> None:
    plan = Planner(program, Strategy(params=TP), Rules({"tp": 2})).made()
    counts = Counter((one.kind, one.cause.phase) for one in plan.collectives)
    assert counts == {("all_reduce", "forward"): 4, ("all_reduce", "backward"): 4}
