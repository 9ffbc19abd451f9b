"""One job by send and recv of torch.distributed and by aiodaft: equal results, and the cost of each.

    python examples/two_models_compared.py --steps 60

Both train the model of two_models.py, use it once, and meet an error in its second half, after which they could go on.
Each rank reads its own part of the batches; with aiodaft, the controller reads them and sends them with its calls.
Last, the outcomes of the seven failures that `seven_failures.py` runs with both.
"""

import argparse
import inspect

import torch
from seven_failures import outcomes, table
from two_models import STEPS, Back, Front, batches, step_of
from two_models_spmd import Link, Result, back_rank, by_ranks, front_rank, run_rank

import aiodaft


class Meter(aiodaft.Actor):
    @aiodaft.method
    async def traffic(self) -> aiodaft.state.Traffic:
        return aiodaft.current_runtime().traffic()


async def by_actors(steps: int) -> Result:
    async with aiodaft.Runtime() as rt, rt.spawn(Front) as front, rt.spawn(Back) as back:
        step = step_of(front, back, "eager")
        for x, y in batches(steps):
            step(x, y)
        losses = await back.loss_history()
        x, y = next(batches(steps))
        outputs = await back.forward(front.forward(x))
        told = "targets of the wrong length were accepted"
        try:
            await step(x, y[:, 1:])
        except ValueError as error:
            told = "\n".join([str(error), *error.__notes__])
        halves = [await (await rt.on(with_=half).spawn(Meter)).traffic() for half in (front, back)]
        other_bytes = rt.traffic().control_sent + sum(half.control_sent for half in halves)
        return Result(losses, outputs, told, sum(half.payload_received for half in halves), other_bytes)


def lines_of_code(*parts: object) -> int:
    lines = [line.strip() for part in parts for line in inspect.getsource(part).splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    ranks, actors = by_ranks(steps), aiodaft.run(by_actors(steps))
    assert ranks.losses == actors.losses
    assert torch.equal(ranks.outputs, actors.outputs)
    by_hand = lines_of_code(Link, front_rank, back_rank, run_rank, by_ranks)
    by_calls = lines_of_code(Front, Back, step_of, Meter, by_actors)
    print(f"{steps} losses and outputs {tuple(ranks.outputs.shape)} are equal, bit for bit\n")
    print(table([("", "torch.distributed, gloo", "aiodaft"), ("lines of code beside the model", by_hand, by_calls)]))
    print(table([("bytes of tensors between the halves", ranks.tensor_bytes, actors.tensor_bytes)]))
    print(table([("all other bytes sent", ranks.other_bytes, actors.other_bytes)]))
    print(f"\n{table(aiodaft.run(outcomes()))}")
    first, *_, last = ranks.error.splitlines()
    print("\nAn error in the second half, where its result is needed; the tracebacks, which both have, are left out:")
    print(f"\ntorch.distributed, gloo\n{first}\n{last}\n\naiodaft\n{actors.error}")


if __name__ == "__main__":
    main()
