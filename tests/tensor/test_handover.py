"""A step takes its state from another one, with any plan and on any workers, without the controller between them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, batches, train  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft import tensor  # noqa: E402
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
