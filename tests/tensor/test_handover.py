"""A step takes its state from another one, or from files, with any plan, and not through the controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tensor_workers import Held  # noqa: E402
from tiny_gpt import GPT, batches, train  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft import checkpoint, tensor  # noqa: E402
from aiodaft.tensor import Strategy  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = {"*": {"dp": Shard(0)}}
TP = {
    "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
    "blocks.*.attn.out.weight": {"tp": Shard(1)},
    "blocks.*.up.*": {"tp": Shard(0)},
    "blocks.*.down.weight": {"tp": Shard(1)},
}


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_state_goes_from_plan_to_plan_and_the_curve_goes_on(rt: aiodaft.Runtime) -> None:
    torch.manual_seed(0)
    model, given = GPT(), list(batches(4))
    program = tensor.capture(train, model, torch.optim.AdamW(model.parameters(), lr=1e-2), *given[0])
    values = program.values(model.state_dict())
    expected = [program.run(values, *batch).item() for batch in given]
    sharded = program.plan(Strategy(inputs=ROWS, params=ROWS, use={"*": {}}), {"dp": 3})
    parallel = program.plan(Strategy(params=TP), {"tp": 2})
    staged = program.plan(Strategy(stages=("blocks.0",), microbatches=1), {"pp": 2})
    async with tensor.workers(rt, {"dp": 3}) as three, tensor.workers(rt, {"tp": 2}) as two:
        first = await three.load(sharded, model.state_dict())
        losses = [(await first(*given[0])).item()]
        second = await two.load(parallel, first)
        losses.append((await second(*given[1])).item())
        async with tensor.workers(rt, {"pp": 2}) as stages:
            third = await stages.load(staged, second)
            losses.append((await third(*given[2])).item())
            back = await three.load(sharded, third)
        losses.append((await back(*given[3])).item())
        # Each step has a state of its own: the first one is as it was after its run.
        again = [(await first(*given[1])).item()]
        state = await back.state()
    assert losses == pytest.approx(expected, abs=1e-5)
    assert again == pytest.approx(expected[1:2], abs=1e-5)
    for name, value in model.state_dict().items():
        assert state[name].shape == value.shape


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.mid(self.up(x)).relu(), 0.5))


def fit(model: MLP, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture(scope="module")
def fitting() -> tuple[tensor.Program, dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, data = MLP(), [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(3)]
    return tensor.capture(fit, model, torch.optim.AdamW(model.parameters()), *data[0]), model.state_dict(), data


async def test_a_checkpoint_goes_on_under_another_plan_bit_by_bit(
    rt: aiodaft.Runtime, tmp_path: Path, fitting: Any
) -> None:
    program, weights, data = fitting
    rows = Strategy(params={"up.*": {"tp": Shard(0)}, "mid.weight": {"tp": Shard(1)}}, inputs=ROWS)
    staged = Strategy(stages=("mid", "down"), microbatches=1)
    first, second = program.plan(rows, {"dp": 2, "tp": 2}), program.plan(staged, {"pp": 3})
    async with tensor.workers(rt, first.axes) as workers:
        step = await workers.load(first, weights, seed=5)
        await step(*data[0])
        begun = step(*data[1])
        saving = await checkpoint.save(step, tmp_path / "one")
        await begun
        state = await step.state()
        loss = (await step(*data[2])).item()
        await saving
    async with tensor.workers(rt, second.axes) as workers:
        here = rt.traffic().payload
        step = await workers.load(second, tmp_path / "one")
        assert rt.traffic().payload == here
        found = await step.state()
        # The random numbers go on with those of the third step.
        assert (await step(*data[2])).item() == pytest.approx(loss, abs=1e-6)
    assert found.keys() == state.keys()
    assert int(found["random.step"]) == 2
    assert all(torch.equal(found[name], one) for name, one in state.items())


async def test_the_files_of_a_step_are_a_state_dict_to_others_and_theirs_are_loaded(
    rt: aiodaft.Runtime, tmp_path: Path, fitting: Any
) -> None:
    package = pytest.importorskip("safetensors.torch")
    program, weights, _ = fitting
    plan = program.plan(Strategy(params={"up.*": {"tp": Shard(0)}}), {"tp": 2})
    package.save_file(weights, tmp_path / "model.safetensors")
    async with tensor.workers(rt, plan.axes) as workers:
        step = await workers.load(plan, tmp_path)
        await (await checkpoint.save(step, tmp_path / "one"))
        os.rename(tmp_path / "one", tmp_path / "two")
        with pytest.raises(FileNotFoundError, match="one has no checkpoint"):
            await workers.load(plan, tmp_path / "one")
    [file] = (tmp_path / "two").glob("*.safetensors")
    found = package.load_file(file)
    assert all(torch.equal(found[name], one) for name, one in weights.items())
    package.save_file(weights | {"mid.bias": torch.zeros(5)}, tmp_path / "model.safetensors")
    async with tensor.workers(rt, plan.axes) as workers:
        with pytest.raises(ValueError, match=r"state\['mid.bias'\] is torch.float32 \(5,\), and the program"):
            await workers.load(plan, tmp_path)


async def test_a_step_runs_beside_the_copy_of_the_state_and_waits_before_it_changes_it(
    rt: aiodaft.Runtime, fitting: Any
) -> None:
    program, weights, data = fitting
    plan = program.plan(Strategy(inputs=ROWS), {"dp": 2})
    async with tensor.workers(rt, plan.axes, Held) as workers:
        await workers.group.all(Held.hold)
        step = await workers.load(plan, weights)
        before = await step.state()
        copies = step.sharded()
        run = step(*data[0])
        # Forward and backward are done, and the copy is not.
        await workers.group.all(Held.wait_update)
        await workers.group.all(Held.go_on)
        shards = await copies
        await run
        after = await step.state()
    found = {name: one for shard in shards for name, one in shard.items()}
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], one) for name, one in before.items())
    assert not torch.equal(after["up.weight"], before["up.weight"])
    # Each tensor was copied by one of the two ranks: they take turns.
    assert {*shards[0]}.isdisjoint(shards[1])
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert abs(sizes[0] - sizes[1]) <= max(tensor.nbytes for tensor in before.values())


async def test_with_a_dead_worker_there_is_no_checkpoint_and_one_error(
    rt: aiodaft.Runtime, tmp_path: Path, fitting: Any
) -> None:
    program, weights, _ = fitting
    plan = program.plan(Strategy(), {"dp": 2})
    async with tensor.workers(rt, plan.axes) as workers:
        step = await workers.load(plan, weights)
        await rt.kill(workers.group[1])
        with pytest.raises(aiodaft.ActorDied):
            await checkpoint.save(step, tmp_path / "one")
    assert os.listdir(tmp_path) == []
