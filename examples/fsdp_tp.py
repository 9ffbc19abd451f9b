"""torch's FSDP2 x tensor parallelism in one group, while another group writes with its weights; a rank is killed.

A round is one call of the trainers. Their state goes to the writers, and from there to the next round: if a rank dies,
the round is made again, and the losses are those of a run without deaths.
"""

import asyncio
import os
import signal
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_gpt import GPT, LENGTH, batches

import aiodaft

PRELOAD = ("train_gpt", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
ROUNDS, STEPS = 3, 6
State = tuple[dict[str, Any], dict[str, Any]]  # of model and optimizer, whole
WHOLE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Trainer(aiodaft.Actor, restart=aiodaft.Restart()):
    def __init__(self) -> None:
        torch.set_num_threads(1)  # ranks share the processors; one thread adds in the same order each time

    @aiodaft.method
    def train(self, number: int, state: State | None) -> tuple[State, list[float]]:
        with aiodaft.current_group().process_group("aiodaft"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            torch.manual_seed(0)
            model = GPT()
            columns, rows = ColwiseParallel(), RowwiseParallel()
            for block in model.blocks:
                plan = {"attn.q": columns, "attn.k": columns, "attn.v": columns, "attn.out": rows, "up": columns}
                parallelize_module(block, mesh["tp"], {**plan, "down": rows})
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            if state is not None:
                set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=WHOLE)
            losses = []
            for x, y in batches(ROUNDS * STEPS)[number * STEPS :][:STEPS]:
                x, y = (rows.chunk(2)[mesh["dp"].get_local_rank()] for rows in (x, y))
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG, mesh["dp"].get_group())
                losses.append(mean.item())
            return cast("State", get_state_dict(model, optimizer, options=WHOLE)), losses

    @aiodaft.method(ordered=False)
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Writer(aiodaft.Actor):
    @aiodaft.method
    def take(self, trained: tuple[State, list[float]]) -> State:
        """Have the weights. The state stays here, also when trainers die."""
        self.model, (self.state, self.losses) = GPT(), trained
        self.model.load_state_dict(self.state[0])
        return self.state

    @aiodaft.method
    @torch.no_grad()
    def write(self, token: int) -> tuple[list[float], list[int]]:
        """The losses of the round, and the tokens that follow one."""
        tokens = [token]
        while len(tokens) < LENGTH:
            tokens.append(int(self.model(torch.tensor([tokens]))[0, -1].argmax()))
        return self.losses, tokens


async def train_once(trainers: aiodaft.Group[Trainer], number: int, state: Any, kill: bool) -> Any:
    """The result of rank 0, which stays there; None if a rank has died."""
    calls = trainers.all(Trainer.train, number, state)
    if kill:
        trainers[2].die.tell()
    await asyncio.gather(*(call.ready() for call in calls))
    errors = [call.exception() for call in calls]
    return None if any(isinstance(error, aiodaft.ActorDied) for error in errors) else calls[0]


async def train(rt: aiodaft.Runtime, *kills: int) -> list[tuple[list[float], list[int]]]:
    """The losses and texts of each round; a rank dies in the rounds `kills`."""
    state, written = None, list[aiodaft.Ref[tuple[list[float], list[int]]]]()
    async with rt.group(4, Trainer) as trainers, rt.group(2, Writer) as writers:
        for number in range(ROUNDS):
            trained = await train_once(trainers, number, state, number in kills)
            while trained is None:
                trained = await train_once(trainers, number, state, kill=False)
            state, _ = writers.all(Writer.take, trained)
            written += writers.each(Writer.write, [1, 2])  # while the trainers are in the next round
        return await asyncio.gather(*written)


async def main() -> None:
    async with aiodaft.Runtime(preload=PRELOAD) as rt:
        expected, found = await train(rt), await train(rt, 1)
    assert found == expected
    for number, (losses, tokens) in enumerate(found[::2]):
        print(f"round {number}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, wrote {tokens[:8]}")


if __name__ == "__main__":
    aiodaft.run(main())
