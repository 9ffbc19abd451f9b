"""Low-communication training of a GPT by members that join and die: DiLoCo or Streaming DiLoCo.

    python examples/diloco.py --variant streaming --members 4 --kill 3 --join 5

Members take many inner steps each for itself, and then one outer step together, by the average of their changes:
Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105. In Streaming DiLoCo, https://arxiv.org/abs/2501.18512,
fragments of the parameters have their outer steps in turn, and inner steps go on while a fragment travels.
"""

import argparse
import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import TypeVar

import torch
from byte_gpt import Stage
from diloco_member import Member, Plan, adamw, batch_of, evaluate, learn
from torch import Tensor

import aiodaft

T = TypeVar("T")
PRELOAD = ("torch", "torch._dynamo")  # which AdamW uses: loaded once, and not by each member
# After 12 outer steps, the momentum of the paper, 0.9, is not better yet.
PLANS = {"diloco": Plan(lr=1.0, momentum=0.5), "streaming": Plan(fragments=5, overlap=1, keep=0.5)}


async def of_the_living(refs: Iterable[aiodaft.Ref[T]]) -> list[T]:
    """The results of the members that have not died."""
    results = await asyncio.gather(*refs, return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException) and not isinstance(error, aiodaft.ActorDied):
            raise error
    return [result for result in results if not isinstance(result, BaseException)]


class Training:
    """The algorithm. It moves no data: parameters go from member to member."""

    def __init__(self, group: aiodaft.Group[Member], plan: Plan) -> None:
        self.group, self.plan = group, plan
        self.outer_steps, self.digest = 0, ""

    async def outer_step(self) -> tuple[int, ...]:
        """Inner steps, and an outer step of one fragment; returns the ranks of the members that are in it."""
        plan, fragment = self.plan, self.outer_steps % self.plan.fragments
        begin = self.outer_steps * plan.steps
        end = begin + plan.steps
        trained = self.group.all(Member.train, range(begin, end - plan.overlap))
        changes = self.group.all(Member.change, fragment)
        # This call is made before the average exists: members take these steps while the changes travel.
        overlapped = self.group.all(Member.train, range(end - plan.overlap, end))
        ranks, sums = await self.combine(changes)
        taken = [self.group[rank].take(total, len(ranks), fragment) for rank, total in zip(ranks, sums, strict=True)]
        digests = set(await of_the_living(taken))
        await of_the_living([*trained, *overlapped])
        if len(digests) != 1:
            raise AssertionError(f"after outer step {self.outer_steps}, members share different states: {digests}")
        (self.digest,) = digests
        self.outer_steps += 1
        return ranks

    async def combine(self, changes: aiodaft.Refs[Tensor]) -> aiodaft.collectives.Survivors[Tensor]:
        """The sum of the changes, without those of members that have died."""
        return await aiodaft.collectives.among_survivors(aiodaft.all_reduce, changes)

    async def change_members(self, count: int) -> None:
        """Leave out the dead, and have `count` members. If one dies meanwhile, this may have to be called again."""
        with suppress(aiodaft.ActorDied, aiodaft.exceptions.OwnerDied, aiodaft.exceptions.PeerLost):
            await self.group.heal(count, prepare=self.catch_up)

    async def catch_up(self, new: list[Member]) -> None:
        state = self.group.any(Member.state)  # of one that lives
        await asyncio.gather(*(member.join(aiodaft.typing.lazy(state)) for member in new))

    async def received(self) -> int:
        """The bytes of tensors that the members have received from each other."""
        return sum(await of_the_living(self.group.all(Member.received)))


def data_parallel(plan: Plan, members: int, steps: int) -> float:
    """The loss after the same inner steps if each is taken by all members together; here in one process."""
    torch.set_num_threads(1)
    model = Stage(0, 1)
    optimizer = adamw(model)
    for step in range(steps):
        parts = zip(*(batch_of(plan, step, rank) for rank in range(members)), strict=True)
        x_BL, y_BL = map(torch.cat, parts)
        learn(model, optimizer, (x_BL, y_BL))
    return evaluate(model)


async def train(rt: aiodaft.Runtime, training: Training, options: SimpleNamespace) -> int:
    """All outer steps, with deaths in the middle of some and new members after some; returns the most bytes of one."""
    rng, most, received = random.Random(options.seed), 0, 0
    for step in range(options.outer_steps):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(training.outer_step())
            if step in options.kill:
                await rt.kill(rng.choice(list(training.group)))
        before, received = received, await training.received()
        most = max(most, received - before)
        if step in options.kill or step in options.join:
            await training.change_members(len(training.group) - (step in options.kill) + (step in options.join))
            received = await training.received()
            print(f"after outer step {step}: {len(training.group)} members")
    return most


async def main(options: SimpleNamespace) -> None:
    plan, members, steps = PLANS[options.variant], options.members, options.outer_steps
    async with aiodaft.Runtime(preload=PRELOAD) as rt:
        # A member that dies is left out, not restarted.
        training = Training(await rt.on(restart="temporary").group(members, Member, plan), plan)
        first = await training.group.any(Member.evaluate)
        most = await train(rt, training, options)
        last, received = await training.group.any(Member.evaluate), await training.received()
        payload = rt.traffic().payload
    inner = steps * plan.steps
    print(f"{options.variant}: loss {first:.4f} -> {last:.4f} after {steps} outer steps, {inner} inner steps")
    print(f"  all members share the same bits after each outer step: {training.digest:.12}")
    # An all-reduce of n bytes takes 2 (K - 1) n: all values go to where they are added, and the sum goes back.
    all_reduce = 2 * (members - 1) * 4 * sum(parameter.numel() for parameter in Stage(0, 1).parameters())
    print(f"  bytes that members have received: {received} ({received / all_reduce:.2f} all-reduces), {most} at a time")
    print(f"  data parallel: loss {data_parallel(plan, members, inner):.4f}, {all_reduce * inner} bytes")
    print(f"  the controller: {payload} payload bytes")


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=PLANS, default="diloco")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--outer-steps", type=int, default=12)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="outer steps in which a member is killed")
    parser.add_argument("--join", type=int, nargs="*", default=[], help="outer steps after which a member joins")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments, SimpleNamespace())


if __name__ == "__main__":
    aiodaft.run(main(options_of()))
