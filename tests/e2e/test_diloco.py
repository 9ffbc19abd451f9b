"""DiLoCo and its family: against plain AdamW, bytes of outer steps, members that join and die (row TR7)."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import signal
import threading
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import diloco
import pytest
import torch
from byte_gpt import Stage
from diloco_member import Change, Member, add_up
from diloco_plan import Plan, adamw, batch_of, bytes_of, learn
from diloco_training import Training
from run_example import run_example
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from traced import TraceFile

import aiodaft
from aiodaft.tensor.aggregation import Int8

pytestmark = pytest.mark.programs

PRELOAD = diloco.PRELOAD
on_module_loop = pytest.mark.asyncio(loop_scope="module")

PLANS = {
    "diloco": Plan(inner_steps=1, batch=1),
    "streaming": Plan(inner_steps=4, fragments=4, keep=0.5, batch=1),
    "overlapped": Plan(inner_steps=8, fragments=4, overlap=1, keep=0.5, batch=1),
    "eager": Plan(inner_steps=1, eager=True, batch=1),
    "desloc": Plan(inner_steps=1, lr=1.0, momentum=0.0, moments=(2, 3), batch=1),
    "coded": Plan(inner_steps=1, batch=1, codec=Int8()),
}
PLANS["coded eager"] = replace(PLANS["eager"], codec=Int8())
PLANS["coded desloc"] = replace(PLANS["desloc"], codec=Int8())
SIZE = 4 * sum(parameter.numel() for parameter in Stage(0, 1).parameters())


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def begin(rt: aiodaft.Runtime, plan: Plan, count: int) -> Training:
    return Training(await rt.on(restart="temporary").group(count, Member, plan), plan)


@on_module_loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{}, {"eager": True}, {"moments": (1, 2)}], ids=repr)
async def test_one_member_whose_outer_steps_take_its_changes_as_they_are_equals_adamw(
    rt: aiodaft.Runtime, options: Any
) -> None:
    training = await begin(rt, plan := Plan(lr=1.0, momentum=0.0, batch=2, **options), count=1)
    assert await training.outer_step() == (() if plan.eager else (0,))
    assert await training.outer_step() == (0,)
    if training.sent is not None:
        assert await training.finish(training.sent) == (0,)
    torch.set_num_threads(1)
    model = Stage(0, 1)
    optimizer = adamw(model)
    for step in range(20):
        learn(model, optimizer, batch_of(plan, step, rank=0))
    (shared, *_), *_ = await training.group[0].state()
    # The difference is that of rounding, which AdamW makes larger.
    torch.testing.assert_close(shared, parameters_to_vector(model.parameters()).detach(), rtol=0, atol=1e-4)


def test_an_outer_step_is_one_of_sgd_with_nesterov_momentum_of_its_fragment_alone() -> None:
    member = Member(Plan(fragments=2, lr=0.7, momentum=0.9, keep=0.5))
    before, kept = member.shared[0].clone(), member.shared[1].clone()
    first, second = torch.full_like(before, 3.0), torch.full_like(before, 1.0)
    for own in member.own:
        own += 8.0
    member.take(2 * first, 2, (0,))
    expected = before - 0.7 * (first + 0.9 * first)
    torch.testing.assert_close(member.shared[0], expected)
    torch.testing.assert_close(member.own[0], (before + 8.0 + expected) / 2)
    assert torch.equal(parameters_to_vector(member.model.parameters()), torch.cat(member.own))
    member.take(second, 1, (0,))
    torch.testing.assert_close(member.shared[0], expected - 0.7 * (second + 0.9 * (0.9 * first + second)))
    assert torch.equal(member.shared[1], kept)
    assert torch.equal(member.own[1], kept + 8.0)


@on_module_loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["diloco", "streaming", "eager", "desloc", "coded"])
async def test_outer_steps_take_the_bytes_of_the_formula(rt: aiodaft.Runtime, variant: str) -> None:
    plan = PLANS[variant]
    training = await begin(rt, plan, count=3)
    passed = rt.traffic().payload
    for step in range(1, 5):
        await training.outer_step()
        assert await training.received() == bytes_of(plan, 3, step - plan.eager)
    assert rt.traffic().payload == passed


def test_the_formula_of_bytes() -> None:
    whole = 2 * (3 - 1) * SIZE
    assert [bytes_of(PLANS["diloco"], 3, steps) for steps in range(3)] == [0, whole, 2 * whole]
    assert bytes_of(PLANS["streaming"], 3, 4) == whole
    # Parameters 6 times, first moments 3 times, second ones twice.
    assert bytes_of(PLANS["desloc"], 3, 6) == (6 + 3 + 2) * whole
    assert bytes_of(PLANS["coded"], 3, 1) == 3 * (3 - 1) * (SIZE // 4 + 4)


GATED = Plan(inner_steps=2, overlap=1, batch=1)


class GatedMember(Member):
    """Ends its last inner step before the outer step only when it is told to."""

    def __init__(self) -> None:
        super().__init__(GATED)
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
    async def combine(self, changes: aiodaft.Refs[Change]) -> aiodaft.collectives.Survivors[Tensor]:
        combined = await super().combine(changes)
        await self.group.all(GatedMember.open)
        return combined


@on_module_loop
@pytest.mark.timeout(120)
async def test_changes_are_added_up_while_members_take_inner_steps(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, GatedMember)
    assert await GatedTraining(group, GATED).outer_step() == (0, 1)


class Paced(Member):
    """Ends the inner steps of its second outer step when the test writes to a FIFO."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PLANS["eager"])
        self.fifo = folder / str(aiodaft.current_group().rank)

    @aiodaft.method
    def train(self, steps: range) -> None:
        super().train(steps)
        if steps == range(1, 2):
            self.fifo.read_text()


@on_module_loop
@pytest.mark.timeout(120)
async def test_an_eager_member_is_never_blocked_by_an_outer_step(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    fifos = [tmp_path / str(rank) for rank in range(2)]
    for fifo in fifos:
        os.mkfifo(fifo)
    group = await rt.group(2, Paced, tmp_path)
    training = Training(group, PLANS["eager"])
    await training.outer_step()
    async with rt.trace(path := tmp_path / "eager.json"):
        stepping = asyncio.get_running_loop().create_task(training.outer_step())
        # Their inner steps are longer than the way of the changes: `change` and `take` wait for these.
        for member in group:
            while (await rt.info(member)).queued < 2:
                pass
        for fifo in fifos:
            await asyncio.to_thread(fifo.write_text, "")
        assert await stepping == (0, 1)
    trace = TraceFile(path)
    assert sum(one["name"] == "Paced.take" for one in trace.slices) == 2
    assert trace.blocked("Paced.take") == 0.0
    async with rt.trace(path := tmp_path / "diloco.json"):
        await (await begin(rt, PLANS["diloco"], 2)).outer_step()
    assert TraceFile(path).blocked("Member.take") > 0.0


class Twins:
    """The members, all in this process: their shared parameters have to have the same bits."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan, self.members, self.steps = plan, [Member(plan) for _ in range(count)], 0
        self.digest = ""
        # The changes that an eager member takes an outer step later.
        self.sent: tuple[tuple[int, ...], list[Any]] | None = None

    def outer_step(self, ranks: tuple[int, ...]) -> str:
        due, begin = self.plan.due(self.steps), self.steps * self.plan.steps
        end = begin + self.plan.steps
        self.train(range(begin, end - self.plan.overlap))
        sent: tuple[tuple[int, ...], list[Any]] | None = (due, [copy.deepcopy(one.change(due)) for one in self.members])
        self.train(range(end - self.plan.overlap, end))
        self.steps += 1
        if self.plan.eager:
            sent, self.sent = self.sent, sent
        if sent is None or not ranks:
            return self.digest
        due, changes = sent
        given = [changes[rank] for rank in ranks]
        total = reduce(torch.add, given) if self.plan.codec is None else add_up(given)
        (self.digest,) = {member.take(total, len(ranks), due) for member in self.members}
        return self.digest

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
        # Those of an eager member are those of the outer step before.
        assert self.training.plan.eager or set(range(len(self.training.group))) - set(ranks) <= set(victims)
        assert self.training.digest == self.twins.outer_step(ranks)

    async def change(self, gone: tuple[int, ...], joining: int) -> None:
        count = len(self.training.group) + joining
        await self.training.change_members(count)
        assert len(self.training.group) == count
        self.twins.replace(list(gone), joining)


@on_module_loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["diloco", "overlapped", "eager", "desloc", "coded eager", "coded desloc"])
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
@pytest.mark.parametrize("seed", range(8))
async def test_random_deaths_and_joins_leave_no_member_behind(rt: aiodaft.Runtime, seed: int) -> None:
    rng = random.Random(seed)
    training = await begin(rt, PLANS[rng.choice(sorted(PLANS))], count=4)
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
