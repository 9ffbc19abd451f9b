"""Low-communication training of a GPT by members that join and die: DiLoCo and its family.

    python examples/diloco.py --variant streaming --codec int8 --members 4 --kill 3 7 9 --join 5 8

Members take many inner steps each for itself, and then one outer step together, by the average of their changes:

    diloco     Douillard et al., https://arxiv.org/abs/2311.08105
    streaming  fragments have their outer steps in turn, and travel during inner steps, https://arxiv.org/abs/2501.18512
    eager      the average comes an outer step later: nobody waits for it, https://arxiv.org/abs/2502.12996
    desloc     the moments of AdamW are averaged, too, but more seldom, https://arxiv.org/abs/2505.22549
"""

import argparse
import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

from diloco_member import Member
from diloco_plan import CODECS, PLANS, bytes_of, data_parallel
from diloco_training import Training

import aiodaft

PRELOAD = ("torch", "torch._dynamo")  # which AdamW uses: loaded once, and not by each member


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
    if training.sent is not None:
        await training.finish(training.sent)
    return most


async def main(options: SimpleNamespace) -> None:
    plan = replace(PLANS[options.variant], codec=CODECS[options.codec])
    members, steps = options.members, options.outer_steps
    async with aiodaft.Runtime(preload=PRELOAD) as rt:
        # A member that dies is left out, not restarted.
        training = Training(await rt.on(restart="temporary").group(members, Member, plan), plan)
        first = await training.group.any(Member.evaluate)
        most = await train(rt, training, options)
        last, received = await training.group.any(Member.evaluate), await training.received()
        payload = rt.traffic().payload
    print(
        f"{options.variant}: loss {first:.4f} -> {last:.4f} after {steps} outer steps, {steps * plan.steps} inner steps"
    )
    print(f"  all members share the same bits after each outer step: {training.digest:.12}")
    print(f"  bytes that members have received: {received}, {most} at a time")
    print(f"  bytes by the formula, without deaths: {bytes_of(plan, members, steps)}")
    loss, parallel = data_parallel(plan, members, steps * plan.steps)
    print(f"  data parallel: loss {loss:.4f}, {parallel} bytes")
    print(f"  the controller: {payload} payload bytes")


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=PLANS, default="diloco")
    parser.add_argument("--codec", choices=CODECS, default="none", help="makes changes shorter")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--outer-steps", type=int, default=12)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="outer steps in which a member is killed")
    parser.add_argument("--join", type=int, nargs="*", default=[], help="outer steps after which a member joins")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments, SimpleNamespace())


if __name__ == "__main__":
    aiodaft.run(main(options_of()))
