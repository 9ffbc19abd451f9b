"""Workers: plans that are loaded once and then are one message a step."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tensor_plans import alone, batch, mlp, start  # noqa: E402
from tensor_workers import Extended  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft import ActorDied  # noqa: E402
from aiodaft.tensor.instructions import ByRank, Instruction, Slot  # noqa: E402
from aiodaft.tensor.loading import Workers, workers  # noqa: E402
from aiodaft.tensor.operations import Input, Output  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATES = [0.1, 0.1, 0.05]


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def close(given: Any, want: Any) -> None:
    torch.testing.assert_close(given, want, rtol=1e-5, atol=1e-6)


def failing(rank: int, size: int = 2) -> list[Instruction]:
    """A row that is not there, at one rank."""
    rows = ByRank(tuple(99 if one == rank else 0 for one in range(size)))
    return [
        Instruction("op", "aten.full.default", ([1], 1.0), {}, (50,)),
        Instruction("op", "aten.select.int", (Slot(50), 0, rows), {}, (51,)),
    ]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}])
async def test_steps_equal_those_of_one_process(rt: aiodaft.Runtime, axes: dict[str, int]) -> None:
    scalars = {"rate": 0.1}
    async with workers(rt, axes) as group:
        step = await group.load(mlp(axes, scalars), start())
        losses = []
        for k, rate in enumerate(RATES):
            # As a scheduler does.
            scalars["rate"] = rate
            losses.append(await step(batch(k)))
        want, state = alone(start(), RATES)
        close(losses, want)
        close(await step.state(), state)
        size = len(group.group)
        used = await step.usage()
    # By formula: all_reduces of the loss (4 bytes) and two gradients over dp, of y over tp.
    for one in used:
        assert one.done == 3
        assert one.collectives == {axis: 3 * {"dp": 3, "tp": 1}[axis] for axis in axes}
    if axes == {"dp": 2}:
        assert [one.received for one in used] == [{"dp": 3 * (4 + 4 * 28 + 4 * 21)}] * size
    if axes == {"tp": 2}:
        assert [one.received for one in used] == [{"tp": 3 * 4 * 18}] * size


async def test_steps_under_way_at_one_time_are_done_in_order(rt: aiodaft.Runtime) -> None:
    scalars = {"rate": 0.1}
    async with workers(rt, {"tp": 2}) as group:
        step = await group.load(mlp({"tp": 2}, scalars), start())
        runs = []
        for k, rate in enumerate(RATES):
            scalars["rate"] = rate
            runs.append(step(batch(k)))
        close([await run for run in reversed(runs)][::-1], alone(start(), RATES)[0])


async def test_a_checkpoint_goes_on_under_another_plan(rt: aiodaft.Runtime) -> None:
    scalars = {"rate": 0.1}
    async with workers(rt, {"tp": 2}) as first, workers(rt, {"dp": 3}) as second:
        step = await first.load(mlp({"tp": 2}, scalars), start())
        await step(batch(0))
        other = await second.load(mlp({"dp": 3}, scalars), await step.state())
        losses = [await other(batch(1)), await other(batch(2))]
        close(losses, alone(start(), [0.1] * 3)[0][1:])


async def test_two_programs_on_one_group_do_not_mix(rt: aiodaft.Runtime) -> None:
    slow, fast = {"rate": 0.01}, {"rate": 0.1}
    async with workers(rt, {"dp": 2}) as group:
        one, two = await group.load(mlp({"dp": 2}, slow), start()), await group.load(mlp({"dp": 2}, fast), start())
        runs = [step(batch(k)) for k in range(3) for step in (one, two)]
        # Another controller of the same group.
        three = await Workers(group.group).load(mlp({"dp": 2}, fast), start())
        more = [three(batch(k)) for k in range(3)]
        losses = await asyncio.gather(*runs, *more)
        close(losses[0:6:2], alone(start(), [0.01] * 3)[0])
        close(losses[1:6:2], alone(start(), [0.1] * 3)[0])
        close(losses[6:], alone(start(), [0.1] * 3)[0])


async def test_users_extend_workers_and_have_the_parts_as_refs(rt: aiodaft.Runtime) -> None:
    async with workers(rt, {"tp": 2}, Extended) as group:
        step = await group.load(mlp({"tp": 2}, {"rate": 0.1}), start())
        assert await group.group.all(Extended.shape, step.name, "up") == [(4, 4), (4, 3)]
        close(torch.cat(await step.refs("up"), 1), start()["up"])
        with pytest.raises(KeyError, match="the state has no 'upp': it has up, down"):
            step.refs("upp")
        # What only planning needs is in no worker.
        assert await group.group.all(Extended.modules) == [[], []]
        before = step.name
        await step.unload()
        with pytest.raises(KeyError, match="no step .* is loaded"):
            await group.group[0].shape(before, "up")
        with pytest.raises(RuntimeError, match="it was unloaded. Load it again"):
            step(batch(0))


async def test_bad_arguments_and_states_are_refused_by_name(rt: aiodaft.Runtime) -> None:
    axes = {"tp": 2}
    async with workers(rt, axes) as group:
        step = await group.load(mlp(axes, {"rate": 0.1}), start())
        with pytest.raises(ValueError, match=r"x is \(5, 4\) torch.float32, and the step was captured with \(6, 4\)"):
            step(batch(0)[1:])
        with pytest.raises(TypeError, match=r"the step takes the arguments x, with parts as captured .*; these are 2 "):
            step(batch(0), batch(1))
        plan = mlp(axes, {"rate": 0.1})
        for state, message in [
            ({"up": start()["up"]}, "state has no parameter 'down': give state=model.state_dict()"),
            (
                start() | {"up": torch.ones(4, 8)},
                r"is torch.float32 \(4, 8\), and .* torch.float32 \(4, 7\)",
            ),
            (start() | {"up": torch.ones(4, 7, device="meta")}, r"state\['up'\] is on the device meta"),
        ]:
            with pytest.raises(ValueError, match=message):
                await group.load(plan, state)
        for odd, message in [
            (start() | {"up": [1.0]}, r"state\['up'\] is a list"),
            ([1], "state is a list: give tensors"),
        ]:
            with pytest.raises(TypeError, match=message):
                await group.load(plan, odd)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"the plan is for axes {'tp': 3}, and the workers have {'tp': 2}"):
            await group.load(mlp({"tp": 3}, {}), start())
        with pytest.raises(TypeError, match="int is no class of workers"):
            workers(rt, axes, int)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="workers have named axes, such as"):
            workers(rt, {})
        # The step is as it was.
        close(await step(batch(0)), alone(start(), [0.1])[0][0])


async def test_a_step_that_fails_before_its_updates_leaves_the_state_as_it_was(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    async with workers(rt, axes) as group:
        step = await group.load(mlp(axes, {"rate": 0.1}), start())
        # The other rank waits for its gradients.
        bad = await group.load(mlp(axes, {"rate": 0.1}, failing(1)), start())
        begun = time.perf_counter()
        with pytest.raises(IndexError) as raised:
            await bad(batch(0))
        assert time.perf_counter() - begun < 5
        assert raised.value.__notes__[0].startswith("raised by aten.select.int (instruction ")
        assert "at rank 1, of aten.mm in mlp.down, mlp.py:7 (forward)" in raised.value.__notes__[0]
        assert raised.value.__notes__[-1] == "the state is as it was before this step; the next one may follow"
        close(await bad.state(), start())
        # The others go on, and so does this one: it fails anew.
        close(await step(batch(0)), alone(start(), [0.1])[0][0])
        with pytest.raises(IndexError):
            await bad(batch(0))


async def test_runs_after_a_failure_are_refused_until_it_was_seen(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    async with workers(rt, axes) as group:
        step = await group.load(mlp(axes, {"rate": 0.1}), start())
        bad = await group.load(mlp(axes, {"rate": 0.1}, failing(0)), start())
        first, second = bad(batch(0)), step(batch(0))
        with pytest.raises(RuntimeError, match="not run at rank 0: an earlier run has failed: IndexError"):
            await second
        with pytest.raises(IndexError):
            await first
        close(await step(batch(0)), alone(start(), [0.1])[0][0])


async def test_a_step_that_fails_in_its_updates_is_unusable_until_it_is_loaded_again(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    plan = mlp(axes, {"rate": 0.1})
    broken = Instruction("op", "aten.select.int", (Slot(40), 0, 99), {}, (52,))
    at = len(plan.instructions) - 1
    bad = replace(plan, instructions=(*plan.instructions[:at], broken, *plan.instructions[at:]), causes=())
    async with workers(rt, axes) as group:
        step = await group.load(bad, start())
        with pytest.raises(IndexError) as raised:
            await step(batch(0))
        assert raised.value.__notes__[-1] == "the state is unusable: load it again"
        with pytest.raises(RuntimeError, match="a step has failed with IndexError: .* Load it again, with a state"):
            step(batch(0))
        step = await group.load(plan, start())
        close(await step(batch(0)), alone(start(), [0.1])[0][0])


@pytest.mark.parametrize(
    ("axes", "kills"),
    [
        ({"dp": 2}, 3),
        ({"dp": 2, "tp": 2}, 1),
        pytest.param({"dp": 2}, 100, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
async def test_after_a_death_at_any_instant_a_healed_group_goes_on_from_a_checkpoint(
    rt: aiodaft.Runtime, axes: dict[str, int], kills: int
) -> None:
    plan, random, late = mlp(axes, {"rate": 0.1}), Random(kills), []
    async with workers(rt, axes, Extended) as group:
        step = await group.load(plan, start())
        want = [await step(batch(k)) for k in range(4)]
        for _ in range(kills):
            step = await group.load(plan, start())
            await step(batch(0))
            checkpoint = await step.state()
            victim, killed = random.randrange(len(group.group)), []
            pid = (await group.group.all(Extended.pid))[victim]

            def kill(pid: int = pid, killed: list[float] = killed) -> None:
                os.kill(pid, signal.SIGKILL)
                killed.append(time.perf_counter())

            asyncio.get_running_loop().call_later(random.uniform(0, 0.02), kill)
            with pytest.raises(ActorDied, match="SIGKILL"):
                while True:
                    await asyncio.gather(*[step(batch(1)) for _ in range(random.randint(1, 4))])
            late.append(time.perf_counter() - killed[0])
            with pytest.raises(RuntimeError, match="Load it again"):
                step(batch(1))
            assert await group.heal() == [victim]
            step = await group.load(plan, checkpoint)
            assert [torch.equal(await step(batch(k)), want[k]) for k in (1, 2, 3)] == [True] * 3
    print(f"seconds from a kill to the error: median {sorted(late)[len(late) // 2]:.3f}, at most {max(late):.3f}")


async def test_the_memory_of_a_run_is_measured_in_the_workers(rt: aiodaft.Runtime) -> None:
    async with workers(rt, {"tp": 2}) as group:
        step = await group.load(mlp({"tp": 2}, {"rate": 0.1}), start())
        first, second = await step.measure(batch(0))
        assert [first.parameters, second.parameters] == [4 * (4 * 4 + 4 * 3), 4 * (4 * 3 + 3 * 3)]
        # With x (24), h and a (6 x 4 each), the term of y and y (18 each), and others.
        assert first.peak > first.parameters + 4 * (24 + 2 * 24 + 18)
        # It was a step as others.
        close(await step(batch(1)), alone(start(), [0.1] * 2)[0][1])


async def test_a_step_that_nothing_refers_to_frees_its_state_with_the_next_load(rt: aiodaft.Runtime) -> None:
    async with workers(rt, {"dp": 2}, Extended) as group:
        step = await group.load(mlp({"dp": 2}, {"rate": 0.1}), start())
        await step(batch(0))
        name = step.name
        del step
        step = await group.load(mlp({"dp": 2}, {"rate": 0.1}), start())
        for error in await asyncio.gather(*group.group.all(Extended.shape, name, "up"), return_exceptions=True):
            assert isinstance(error, KeyError)
        assert await group.group.all(Extended.shape, step.name, "up") == [(4, 7)] * 2


async def test_random_numbers_depend_on_the_seed_and_the_number_of_the_step_alone(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    plan = replace(
        mlp(axes, {}),
        inputs=(Input(0, "random.seed", "scalar"), Input(1, "random.step", "scalar"), Input(2, "x", "argument")),
        instructions=(
            Instruction("op", "aten.full.default", ([2], 1000.0), {}, (3,)),
            Instruction("op", "aten.add.Tensor", (Slot(3), Slot(0)), {"alpha": 10}, (4,)),
            Instruction("op", "aten.add.Tensor", (Slot(4), Slot(1)), {}, (5,)),
        ),
        outputs=(Output(5, "loss", "result"),),
        causes=(),
    )
    async with workers(rt, axes) as group:
        step = await group.load(plan, seed=7)
        assert [float((await step(batch(0)))[0]) for _ in range(2)] == [1070.0, 1071.0]
        other = await group.load(plan, await step.state(), seed=9)
        assert [float((await other(batch(0)))[0]) for _ in range(2)] == [1072.0, 1073.0]


async def test_a_wait_for_a_step_that_is_cancelled_ends_it_at_the_workers(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    async with workers(rt, axes) as group:
        step, other = [await group.load(mlp(axes, {"rate": 0.1}), start()) for _ in range(2)]
        runs = [step(batch(0)) for _ in range(50)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await runs[-1]
        with pytest.raises(RuntimeError, match="a step was cancelled. Load it again"):
            step(batch(0))
        await asyncio.gather(*runs[:-1], return_exceptions=True)
        # Another program was not under way.
        close(await other(batch(0)), alone(start(), [0.1])[0][0])


async def test_members_on_several_hosts_run_the_same_steps_and_fail_alike(rt: aiodaft.Runtime) -> None:
    axes = {"dp": 2}
    async with workers(rt, axes, Extended) as group:
        await group.group.all(Extended.live_apart)
        step = await group.load(mlp(axes, {"rate": 0.1}), start())
        close([await run for run in [step(batch(k)) for k in range(3)]], alone(start(), [0.1] * 3)[0])
        bad = await group.load(mlp(axes, {"rate": 0.1}, failing(1)), start())
        with pytest.raises(IndexError):
            await bad(batch(0))
        close(await bad.state(), start())
        checkpoint = await step.state()
        os.kill((await group.group.all(Extended.pid))[1], signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            for _ in range(1000):
                await step(batch(1))
        assert await group.heal() == [1]
        step = await group.load(mlp(axes, {"rate": 0.1}), checkpoint)
        close(await step(batch(3)), alone(start(), [0.1] * 4)[0][3])


@pytest.mark.programs
@pytest.mark.timeout(300)
async def test_operations_between_collectives_are_compiled(rt: aiodaft.Runtime) -> None:
    axes, scalars = {"tp": 2}, {"rate": 0.1}
    async with workers(rt, axes) as group:
        step = await group.load(mlp(axes, scalars), start(), compile=True)
        losses = []
        for k, rate in enumerate(RATES):
            scalars["rate"] = rate
            losses.append(await step(batch(k)))
        close(losses, alone(start(), RATES)[0])
        for one in await step.usage():
            assert (one.segments, one.plain, one.collectives) == (1, (), {"tp": 3})
