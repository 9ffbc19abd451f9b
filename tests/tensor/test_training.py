"""Training on workers: losses of one process, collectives and bytes as planned, and checkpoints for any plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, batches, train  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft.methods import method  # noqa: E402
from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.loading import workers  # noqa: E402
from aiodaft.tensor.planner import Planner  # noqa: E402
from aiodaft.tensor.rules import Rules  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402
from aiodaft.tensor.worker import Worker  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 6
ROWS = {"*": {"dp": Shard(0)}}
STRATEGIES: dict[str, tuple[Strategy, dict[str, int]]] = {
    "zero1": (Strategy(inputs=ROWS, optimizer=ROWS), {"dp": 2}),
    "zero3": (Strategy(inputs=ROWS, params=ROWS, use={"*": {}}), {"dp": 3}),
    "tp": (
        Strategy(
            params={
                "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
                "blocks.*.attn.out.weight": {"tp": Shard(1)},
                "blocks.*.up.*": {"tp": Shard(0)},
                "blocks.*.down.weight": {"tp": Shard(1)},
            },
            inputs=ROWS,
        ),
        {"dp": 1, "tp": 2},
    ),
}


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


@pytest.fixture(scope="module")
def optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def program(model: GPT, optimizer: torch.optim.Optimizer) -> Any:
    return capture(train, model, optimizer, *next(batches(1)))


@pytest.fixture(scope="module")
def plans(program: Any) -> dict[str, Any]:
    return {name: Planner(program, strategy, Rules(axes)).made() for name, (strategy, axes) in STRATEGIES.items()}


@pytest.fixture(scope="module")
def alone(model: GPT) -> list[float]:
    here = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(here.parameters(), lr=1e-2)
    losses = []
    for k, (x, y) in enumerate(batches(STEPS)):
        optimizer.param_groups[0]["lr"] = 1e-2 / (k + 1)
        losses.append(train(here, optimizer, x, y).item())
    return losses


@pytest.mark.parametrize("name", STRATEGIES)
async def test_a_strategy_trains_as_one_process_and_another_one_goes_on_from_its_checkpoint(
    rt: aiodaft.Runtime,
    name: str,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    plans: dict[str, Any],
    alone: list[float],
) -> None:
    plan, steps, losses = plans[name], list(enumerate(batches(STEPS))), []
    async with workers(rt, plan.axes) as group:
        step = await group.load(plan, model.state_dict())
        for k, (x, y) in steps[:4]:
            # As a scheduler does: the step reads it live.
            optimizer.param_groups[0]["lr"] = 1e-2 / (k + 1)
            losses.append(float(await step(x, y)))
        used, checkpoint = await step.usage(), await step.state()
        measured = await step.measure(*steps[0][1])
    assert [one.peak for one in measured] == list(plan.peak)
    for rank, one in enumerate(used):
        assert one.collectives == {axis: 4 * sum(c.axis == axis for c in plan.collectives) for axis in plan.axes}
        assert one.received == {axis: 4 * received[rank] for axis, received in plan.bytes.items()}
    async with workers(rt, plans["zero1"].axes) as group:
        step = await group.load(plans["zero1"], checkpoint)
        for k, (x, y) in steps[4:]:
            optimizer.param_groups[0]["lr"] = 1e-2 / (k + 1)
            losses.append(float(await step(x, y)))
    assert losses == pytest.approx(alone, abs=1e-5)


class Listening(Worker):
    @method
    async def payload(self) -> int:
        """The bytes that this process has received from others, but for small values inside of messages."""
        return aiodaft.current_runtime().traffic().payload_received


def train_mlp(model: Any, optimizer: Any, x: Any) -> Any:
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.programs
@pytest.mark.asyncio(loop_scope="function")
async def test_the_bytes_that_a_transport_brings_are_those_of_the_plan() -> None:
    layers = [torch.nn.Linear(*shape, bias=False) for shape in ((200, 400), (400, 200))]
    model, x = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]), torch.randn(400, 200)
    program = capture(train_mlp, model, torch.optim.SGD(model.parameters(), lr=1e-3), x)
    columns, rows = {"0.weight": {"dp": Shard(0)}}, {"2.weight": {"dp": Shard(1)}}
    plans = {
        "data": program.plan(Strategy(inputs=ROWS), {"dp": 2}),
        "ZeRO-3": program.plan(Strategy(inputs=ROWS, params=ROWS, use={"*": {}}), {"dp": 2}),
        "tensor": program.plan(Strategy(params=columns | rows), {"dp": 2}),
        "pipeline": program.plan(Strategy(stages=("0",), microbatches=2), {"pp": 2}),
    }
    counted = {}
    async with aiodaft.Runtime(preload=(), transport="tcp") as rt:
        for axes in ({"dp": 2}, {"pp": 2}):
            async with workers(rt, axes, Listening) as group:
                for name, plan in plans.items():
                    if plan.axes == axes:
                        step = await group.load(plan, model.state_dict())
                        await step(x)  # makes the connections
                        before = await group.group.all(Listening.payload)
                        await step(x)
                        after = await group.group.all(Listening.payload)
                        counted[name] = [b - a for a, b in zip(before, after, strict=True)]
    for name, plan in plans.items():
        # Scalars go inside of messages, and the controller sends the argument to the ranks that take it.
        large = [one for one in plan.collectives if max(one.received) > 4]
        arguments = [
            sum(one.role == "argument" and rank in plan.ranks_of(one.stage) for one in plan.inputs) for rank in (0, 1)
        ]
        part = x.nbytes // 2 if name in ("data", "ZeRO-3") else x.nbytes
        assert counted[name] == [
            sum(one.times * one.received[rank] for one in large) + arguments[rank] * part for rank in (0, 1)
        ], name
