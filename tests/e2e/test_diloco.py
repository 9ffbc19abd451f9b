"""DiLoCo and Streaming DiLoCo: against plain AdamW, bytes of outer steps, members that join and die (row TR7)."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import signal
import threading
from functools import reduce

import diloco
import pytest
import torch
from byte_gpt import Stage
from diloco import Training
from diloco_member import Member, Plan, adamw, batch_of, learn
from run_example import run_example
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import aiodaft

pytestmark = pytest.mark.programs

PRELOAD = diloco.PRELOAD
on_module_loop = pytest.mark.asyncio(loop_scope="module")

PLANS = {
    "diloco": Plan(inner_steps=1, batch=1),
    "streaming": Plan(inner_steps=4, fragments=4, keep=0.5, batch=1),
    "overlapped": Plan(inner_steps=8, fragments=4, overlap=1, keep=0.5, batch=1),
}
SIZE = 4 * sum(parameter.numel() for parameter in Stage(0, 1).parameters())


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def begin(rt: aiodaft.Runtime, plan: Plan, count: int) -> Training:
    return Training(await rt.on(restart="temporary").group(count, Member, plan), plan)


@on_module_loop
@pytest.mark.timeout(120)
async def test_one_member_whose_outer_steps_take_its_changes_as_they_are_equals_adamw(rt: aiodaft.Runtime) -> None:
    training = await begin(rt, plan := Plan(lr=1.0, momentum=0.0, batch=2), count=1)
    for _ in range(2):
        assert await training.outer_step() == (0,)
    torch.set_num_threads(1)
    model = Stage(0, 1)
    optimizer = adamw(model)
    for step in range(20):
        learn(model, optimizer, batch_of(plan, step, rank=0))
    (shared,), _ = await training.group[0].state()
    # The difference is that of rounding, which AdamW makes larger.
    torch.testing.assert_close(shared, parameters_to_vector(model.parameters()).detach(), rtol=0, atol=1e-4)


def test_an_outer_step_is_one_of_sgd_with_nesterov_momentum_of_its_fragment_alone() -> None:
    member = Member(Plan(fragments=2, lr=0.7, momentum=0.9, keep=0.5))
    before, kept = member.shared[0].clone(), member.shared[1].clone()
    first, second = torch.full_like(before, 3.0), torch.full_like(before, 1.0)
    for own in member.own:
        own += 8.0
    member.take(2 * first, 2, 0)
    expected = before - 0.7 * (first + 0.9 * first)
    torch.testing.assert_close(member.shared[0], expected)
    torch.testing.assert_close(member.own[0], (before + 8.0 + expected) / 2)
    assert torch.equal(parameters_to_vector(member.model.parameters()), torch.cat(member.own))
    member.take(second, 1, 0)
    torch.testing.assert_close(member.shared[0], expected - 0.7 * (second + 0.9 * (0.9 * first + second)))
    assert torch.equal(member.shared[1], kept)
    assert torch.equal(member.own[1], kept + 8.0)


@on_module_loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["diloco", "streaming"])
async def test_an_outer_step_takes_the_bytes_of_one_all_reduce_of_a_fragment(rt: aiodaft.Runtime, variant: str) -> None:
    training, fragments = await begin(rt, PLANS[variant], count=3), PLANS[variant].fragments
    passed = rt.traffic().payload
    for step in range(1, fragments + 1):
        await training.outer_step()
        assert await training.received() == 2 * (3 - 1) * SIZE * step // fragments
    assert rt.traffic().payload == passed


class GatedMember(Member):
    """Ends its last inner step before the outer step only when it is told to."""

    def __init__(self) -> None:
        super().__init__(Plan(inner_steps=2, overlap=1, batch=1))
        self.gate = threading.Event()

    @aiodaft.method
    def train(self, steps: range) -> None:
        super().train(steps)
        if steps.start == 1:
            self.gate.wait()

    @aiodaft.method
    async def open(self) -> None:
        self.gate.set()


class GatedTraining(Training):
    async def combine(self, changes: aiodaft.Refs[Tensor]) -> aiodaft.collectives.Survivors[Tensor]:
        combined = await super().combine(changes)
        await self.group.all(GatedMember.open)
        return combined


@on_module_loop
@pytest.mark.timeout(120)
async def test_changes_are_added_up_while_members_take_inner_steps(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, GatedMember)
    assert await GatedTraining(group, Plan(inner_steps=2, overlap=1)).outer_step() == (0, 1)


class Twins:
    """The members, all in this process: their shared parameters have to have the same bits."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan, self.members, self.steps = plan, [Member(plan) for _ in range(count)], 0

    def outer_step(self, ranks: tuple[int, ...]) -> str:
        fragment, begin = self.steps % self.plan.fragments, self.steps * self.plan.steps
        end = begin + self.plan.steps
        self.train(range(begin, end - self.plan.overlap))
        total = reduce(torch.add, [self.members[rank].change(fragment) for rank in ranks])
        self.train(range(end - self.plan.overlap, end))
        self.steps += 1
        (digest,) = {self.members[rank].take(total, len(ranks), fragment) for rank in ranks}
        return digest

    def train(self, steps: range) -> None:
        for rank, member in enumerate(self.members):
            for step in steps:
                learn(member.model, member.inner, batch_of(self.plan, step, rank))

    def replace(self, gone: list[int], joining: int) -> None:
        state = next(member for rank, member in enumerate(self.members) if rank not in gone).state()
        for rank in [*gone, *range(len(self.members), len(self.members) + joining)]:
            self.members[rank : rank + 1] = [Member(self.plan)]
            self.members[rank].join(copy.deepcopy(state))


class Churn:
    """Training by members that die and join, next to the twins."""

    def __init__(self, rt: aiodaft.Runtime, training: Training, count: int) -> None:
        self.rt, self.training = rt, training
        self.twins = Twins(training.plan, count)

    async def step(self, victims: tuple[int, ...] = (), turns: int = 0) -> None:
        """An outer step in which some members are killed, after so many turns of the loop."""
        pids = [(await self.rt.info(self.training.group[rank])).pid for rank in victims]
        stepping = asyncio.get_running_loop().create_task(self.training.outer_step())
        for _ in range(1 + turns):
            await asyncio.sleep(0)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ranks = await stepping
        assert set(range(len(self.training.group))) - set(ranks) <= set(victims)
        assert self.training.digest == self.twins.outer_step(ranks)

    async def change(self, gone: tuple[int, ...], joining: int) -> None:
        count = len(self.training.group) + joining
        await self.training.change_members(count)
        assert len(self.training.group) == count
        self.twins.replace(list(gone), joining)


@on_module_loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["diloco", "overlapped"])
async def test_members_that_survive_and_those_that_join_share_the_same_bits(rt: aiodaft.Runtime, variant: str) -> None:
    plan = PLANS[variant]
    training = await begin(rt, plan, count=3)
    churn = Churn(rt, training, count=3)
    passed = rt.traffic().payload
    await churn.step()
    await churn.step(victims=(1,))
    await churn.change(gone=(1,), joining=1)
    await churn.step()
    await churn.step(victims=(0, 2))
    await churn.change(gone=(0, 2), joining=0)
    await churn.step()
    assert rt.traffic().payload == passed


@on_module_loop
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
async def test_random_deaths_and_joins_leave_no_member_behind(rt: aiodaft.Runtime, seed: int) -> None:
    rng = random.Random(seed)
    training = await begin(rt, PLANS[rng.choice(["diloco", "streaming", "overlapped"])], count=4)
    churn = Churn(rt, training, count=4)
    for _ in range(20):
        size = len(training.group)
        victims = tuple(rng.sample(range(size), rng.randrange(size)))
        await churn.step(victims, turns=rng.randrange(200))
        await churn.change(victims, joining=rng.randrange(2) if size < 5 else 0)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("variant", "steps", "worse"), [("diloco", 12, 0.0), ("streaming", 60, 0.01)])
def test_four_members_reach_the_loss_of_data_parallel_training_by_a_tenth_of_its_bytes(
    variant: str, steps: int, worse: float
) -> None:
    said = run_example("diloco.py", "--variant", variant, "--outer-steps", str(steps))
    (loss,), (received,) = re.findall(r" -> ([\d.]+) after", said), re.findall(r"received: (\d+)", said)
    ((parallel_loss, parallel_bytes),) = re.findall(r"data parallel: loss ([\d.]+), (\d+) bytes", said)
    assert float(loss) <= float(parallel_loss) + worse
    assert 10 * int(received) == int(parallel_bytes)


@pytest.mark.timeout(120)
def test_the_example_goes_on_when_a_member_dies() -> None:
    said = run_example("diloco.py", "--members", "2", "--outer-steps", "1", "--kill", "0", "--join", "0")
    assert "after outer step 0: 2 members" in said
    assert "the controller: 0 payload bytes" in said
