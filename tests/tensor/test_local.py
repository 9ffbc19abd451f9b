"""Functions of local tensors in code for whole ones: attention in a ring, experts, and gradients through them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import local_models  # noqa: E402
from local_models import Attending, Mixture, Scaled, batches, scaled, train  # noqa: E402
from lockstep import run_whole  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.loading import workers  # noqa: E402
from aiodaft.tensor.local_functions import local  # noqa: E402
from aiodaft.tensor.planner import Planner  # noqa: E402
from aiodaft.tensor.rules import Rules  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402

ON_THE_LOOP = pytest.mark.asyncio(loop_scope="module")
STEPS = 3


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def trained(model: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses and the last state in one process, where a local function is that of whole tensors."""
    here = copy.deepcopy(model)
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    return [train(here, optimizer, x, y).item() for x, y in batches(STEPS)], here.state_dict()


def captured(model: Any) -> Any:
    return capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), *batches(1)[0])


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2}])
def test_each_rank_does_its_part_and_gradients_of_replicas_are_summed(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Scaled()
    program, (losses, state) = captured(model), trained(model)
    strategy = Strategy(inputs={"*": {"dp": Shard(0)}}) if "dp" in axes else Strategy()
    plan = Planner(program, strategy, Rules(axes)).made()
    targets = {one.target for one in plan.instructions if one.kind == "local"}
    assert any(str(one).endswith(", whole") for one in targets) == ("dp" not in axes)
    values, found = {**program.values(model.state_dict()), **program.scalars}, []
    for x, y in batches(STEPS):
        made = run_whole(plan, {**values, **program.arguments.bind(x, y)})
        found += [made.pop(one.name).item() for one in plan.outputs if one.role == "result"]
        values |= made
        values["random.step"] += 1
    assert found == pytest.approx(losses, abs=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(values[name], value, atol=1e-5, rtol=1e-5)


@ON_THE_LOOP
@pytest.mark.parametrize(
    ("make", "strategy", "axes"),
    [
        (Attending, Strategy(inputs={"*": {"cp": Shard(1)}}), {"cp": 3}),
        (Mixture, Strategy(inputs={"*": {"ep": Shard(0)}}, params={"weight": {"ep": Shard(0)}}), {"ep": 2}),
    ],
)
async def test_rings_and_experts_train_as_one_process(
    rt: aiodaft.Runtime, make: Any, strategy: Strategy, axes: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model = make()
    losses, state = trained(model)
    plan = Planner(captured(model), strategy, Rules(axes)).made()
    async with workers(rt, axes) as group:
        step = await group.load(plan, model.state_dict())
        found = [float(await step(x, y)) for x, y in batches(STEPS)]
        assert found == pytest.approx(losses, abs=1e-5)
        last = await step.state()
        # A graph of autograd between forward and backward is no tensor.
        assert all(one.peak > one.parameters > 0 for one in await step.measure(*batches(1)[0]))
    for name, value in state.items():
        torch.testing.assert_close(last[name], value, atol=1e-5, rtol=1e-5)


@ON_THE_LOOP
async def test_a_function_with_parts_of_other_shapes_is_refused_at_its_rank(rt: aiodaft.Runtime) -> None:
    wrong = local(local_models.first_row, whole=lambda x: x * 2, inputs=[{"dp": Shard(0)}], outputs={"dp": Shard(0)})

    def step(x: Any) -> Any:
        return wrong(x).sum()

    plan = Planner(capture(step, torch.ones(4, 2)), Strategy(), Rules({"dp": 2})).made()
    async with workers(rt, {"dp": 2}) as group:
        run = await group.load(plan)
        with pytest.raises(
            ValueError, match=r"first_row gave parts of the shapes \[\[1, 2\]\].* they are \[\[2, 2\]\]"
        ):
            await run(torch.ones(4, 2))
    with pytest.raises(TypeError, match=r"takes 2 tensors, as `inputs` says, not 1"):
        scaled(torch.ones(2))
