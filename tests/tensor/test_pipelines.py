"""Programs in stages: bit by bit what accumulation over micro-batches in one process gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, batches, loss_of, train  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft.pipeline import solved, zb_h1  # noqa: E402
from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.loading import workers  # noqa: E402
from aiodaft.tensor.operations import Trace  # noqa: E402
from aiodaft.tensor.plan import Plan  # noqa: E402
from aiodaft.tensor.program import plan  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

TP = {
    "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
    "blocks.*.attn.out.weight": {"tp": Shard(1)},
    "blocks.*.up.*": {"tp": Shard(0)},
    "blocks.*.down.weight": {"tp": Shard(1)},
}
MICROBATCHES = 2


def model_of(layers: int = 2) -> GPT:
    torch.manual_seed(0)
    return GPT(layers)


@cache
def micro(count: int) -> Trace:
    model, (x, y) = model_of(), next(batches(1))
    rows = len(x) // count
    return capture(train, model, torch.optim.AdamW(model.parameters(), lr=1e-2), x[:rows], y[:rows])


def planned(strategy: Strategy, axes: dict[str, int]) -> Plan:
    return plan(micro(1), micro, strategy, axes)


def accumulated(steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and parameters of one process."""
    model = model_of()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for x, y in batches(steps):
        parts = []
        for some, those in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model, some, those)
            (loss / MICROBATCHES).backward()  # type: ignore[no-untyped-call]  # of torch
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append((torch.stack(parts).sum() / MICROBATCHES).item())
    return losses, model.state_dict()


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_stages_are_bitwise_accumulation(rt: aiodaft.Runtime) -> None:
    expected, parameters = accumulated(3)
    whole = sum(value.nbytes for value in parameters.values())
    async with workers(rt, {"pp": 2}) as pair:
        for schedule in ("one_f_one_b", "zb_h1", solved([0, 1], MICROBATCHES, held=2, seconds=0)):
            made = planned(Strategy(stages=("blocks.0",), microbatches=MICROBATCHES, schedule=schedule), {"pp": 2})
            step = await pair.load(made, model_of().state_dict())
            assert [(await step(x, y)).item() for x, y in batches(3)] == expected
            state = await step.state()
            assert [name for name, value in parameters.items() if not torch.equal(state[name], value)] == []
            for rank, usage in enumerate(await step.usage()):
                assert usage.received == {axis: 3 * received[rank] for axis, received in made.bytes.items()}
            measured = await step.measure(*next(batches(1)))
            assert [one.peak for one in measured] == list(made.peak)
            held = [one.parameters for one in measured]
            assert sum(held) == whole
            assert max(held) < 0.6 * whole
            await step.unload()


async def test_what_goes_from_stage_to_stage_is_one_activation_and_one_gradient() -> None:
    made = planned(Strategy(stages=("blocks.0",), microbatches=MICROBATCHES), {"pp": 2})
    x, _ = next(batches(1))
    activation = x.numel() * 16 * 4
    assert made.bytes == {"pp": (activation, activation)}
    assert [(one.kind, one.cause.phase, one.times) for one in made.collectives] == [
        ("send", "backward", MICROBATCHES),
        ("send", "forward", MICROBATCHES),
    ]


async def test_stages_of_parts_reduce_gradients_once_a_step() -> None:
    strategy = Strategy(stages=("blocks.0",), microbatches=MICROBATCHES, params=TP, inputs={"*": {"dp": Shard(0)}})
    made = planned(strategy, {"pp": 2, "dp": 2, "tp": 2})
    gradients = [one for one in made.collectives if one.cause.operation == "gradient"]
    assert [(one.kind, one.axis, one.times) for one in gradients] == [("all_reduce", "dp", 1)] * 2
    layers = [one for one in made.collectives if one.axis == "tp"]
    assert len(layers) == 8
    assert {one.times for one in layers} == {MICROBATCHES}


@pytest.mark.parametrize(
    ("strategy", "axes", "message"),
    [
        (Strategy(stages=("blocks.0",)), {"dp": 2}, "2 stages on 1 ranks of the axis pp"),
        (Strategy(stages=("block.0",)), {"pp": 2}, "no module 'block.0' gives a tensor; the nearest are blocks.0"),
        (Strategy(stages=("blocks.1", "blocks.0")), {"pp": 3}, "in the order in which they end"),
        (Strategy(stages=("blocks.0",), schedule="fast"), {"pp": 2}, "give one of gpipe, interleaved"),
        (
            Strategy(stages=("blocks.0",), microbatches=4, schedule=zb_h1(2, 2)),
            {"pp": 2},
            "schedule has 2 ranks, 2 stages and 2 micro-batches; the strategy has 2, 2 and 4",
        ),
        (Strategy(), {"pp": 2}, "1 stages on 2 ranks of the axis pp"),
    ],
)
async def test_stages_that_do_not_fit_are_refused(strategy: Strategy, axes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(strategy, axes)


@pytest.mark.programs
async def test_eight_workers_in_three_dimensions_train_as_one_process(rt: aiodaft.Runtime) -> None:
    # Each rank of a stage has other words of the vocabulary.
    params = {**TP, "tok.weight": {"tp": Shard(0)}, "head.weight": {"tp": Shard(0)}}
    strategy = Strategy(stages=("blocks.0",), microbatches=MICROBATCHES, params=params, inputs={"*": {"dp": Shard(0)}})
    made = planned(strategy, {"pp": 2, "dp": 2, "tp": 2})
    expected, _ = accumulated(20)
    async with workers(rt, made.axes) as eight:
        step = await eight.load(made, model_of().state_dict())
        losses = [(await step(x, y)).item() for x, y in batches(20)]
        usage = await step.usage()
    assert losses == pytest.approx(expected, abs=1e-5)
    for rank, used in enumerate(usage):
        assert used.received == {axis: 20 * received[rank] for axis, received in made.bytes.items()}


def clipped(model: GPT, optimizer: Any, x: Any, y: Any) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


@pytest.mark.programs
@pytest.mark.parametrize(
    ("schedule", "tied"), [("gpipe", True), ("zb_h1", False), ("zbv", True), ("interleaved", False)]
)
async def test_any_schedule_with_a_norm_of_all_gradients(rt: aiodaft.Runtime, schedule: str, tied: bool) -> None:
    def model_here() -> GPT:
        model = model_of(4)
        if tied:
            model.head.weight = model.tok.weight
        return model

    cuts = ("blocks.0", "blocks.1", "blocks.2") if schedule in ("zbv", "interleaved") else ("blocks.1",)
    strategy = Strategy(stages=cuts, microbatches=4, schedule=schedule)
    model, (x, y) = model_here(), next(batches(1))
    program = capture(clipped, model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y)
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in batches(3):
        parts = [loss_of(model, some, those) for some, those in zip(x.chunk(4), y.chunk(4), strict=True)]
        for loss in parts:
            (loss / 4).backward()  # type: ignore[no-untyped-call]  # of torch
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected += [torch.stack(parts).sum().item() / 4, norm.item()]
    async with workers(rt, {"pp": 2}) as pair:
        step = await pair.load(program.plan(strategy, {"pp": 2}), first)
        given = [one.item() for x, y in batches(3) for one in await step(x, y)]
        state = await step.state()
    assert [name for name, value in model.state_dict().items() if not torch.equal(state[name], value)] == []
    assert given == pytest.approx(expected, abs=1e-6)


async def test_buffers_of_micro_batches_and_what_no_stage_reads_are_those_of_accumulation(rt: aiodaft.Runtime) -> None:
    def fit(model: Any, optimizer: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.average.mul_(0.5).add_(model[3].weight, alpha=0.5)
        return loss

    torch.manual_seed(0)
    # The stage in the middle has no tensors of its own.
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(2)))
    model.register_parameter("average", torch.nn.Parameter(torch.ones(2, 4)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 3)
    made = capture(fit, model, optimizer, x).plan(Strategy(stages=("1", "2"), microbatches=2), {"pp": 3})
    async with workers(rt, made.axes) as group:
        step = await group.load(made, model.state_dict())
        await step(x)
        state = await step.state()
    for part in x.chunk(2):
        (model(part).square().mean() / 2).backward()  # type: ignore[no-untyped-call]  # of torch
    optimizer.step()
    with torch.no_grad():
        model.average.mul_(0.5).add_(model[3].weight, alpha=0.5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value)


async def test_an_update_that_reads_parameters_of_two_stages_is_refused() -> None:
    def fit(model: Any, x: Any) -> None:
        model(x).sum().backward()
        with torch.no_grad():
            model[0].weight.lerp_(model[1].weight, 0.5)

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"the update of stage 1 reads 0.weight, which stage 0 has: cut the program"):
        capture(fit, model, torch.ones(2, 3)).plan(Strategy(stages=("0",)), {"pp": 2})
