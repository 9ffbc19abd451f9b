"""A GPT written for one device, trained by several workers: a strategy, which is data, says how.

    python examples/train_gpt.py --strategy tp                     # dp, zero3, tp, pp or 3d
    python examples/train_gpt.py --strategy zero3 --write mine.json
    python examples/train_gpt.py --strategy mine.json --axes dp=4

Model and step know nothing of workers. The step is captured once; the plan says each collective and its bytes before
any process starts; then the losses are compared with those of one process.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import aiodaft
from aiodaft import tensor
from aiodaft.tensor import Shard, Strategy

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, ROWS = 64, 32, 64, 4, 2, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (z.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for z in (self.q(x), self.k(x), self.v(x)))
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(functional.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln(h))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def parts() -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Each token is the one before it, times 5 plus 1: easy to learn."""
    rows = [torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(at)) for at in range(count)]
    for _ in range(LENGTH):
        rows = [torch.cat([row, (5 * row[:, -1:] + 1) % VOCABULARY], 1) for row in rows]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


COLUMNS, ROWWISE = {"tp": Shard(0)}, {"tp": Shard(1)}
MEGATRON = {"*.[qkv].*": COLUMNS, "*.up.*": COLUMNS, "*.out.weight": ROWWISE, "*.down.weight": ROWWISE}
DATA = {"*": {"dp": Shard(0)}}
STRATEGIES = {
    "dp": (Strategy(inputs=DATA), {"dp": 2}),
    "zero3": (Strategy(params=DATA, inputs=DATA, use={"*": {}}), {"dp": 2}),
    "tp": (Strategy(params=MEGATRON), {"tp": 2}),
    "pp": (Strategy(stages=("blocks.0",), microbatches=4, schedule="zb_h1"), {"pp": 2}),
    "3d": (Strategy(params=MEGATRON, inputs=DATA, stages=("blocks.0",), microbatches=2), {"pp": 2, "dp": 2, "tp": 2}),
}


def chosen(name: str, axes: str) -> tuple[Strategy, dict[str, int]]:
    strategy, default = STRATEGIES.get(name, (None, {}))
    given = {axis: int(size) for axis, _, size in (one.partition("=") for one in axes.split(",") if one)}
    return strategy or Strategy.from_json(Path(name).read_text()), given or default


def captured(model: GPT, optimizer: torch.optim.Optimizer) -> tensor.Program:
    return tensor.capture(train, model, optimizer, *batches(1)[0])


def program() -> tensor.Program:  # for `aiodaft plan`
    return captured(*parts()[:2])


async def main(plan: tensor.Plan, model: GPT, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
    data, losses = batches(steps), []
    async with aiodaft.Runtime() as rt, tensor.workers(rt, plan.axes) as workers:
        step = await workers.load(plan, model.state_dict())
        for x, y in data:
            losses.append((await step(x, y)).item())
            schedule.step()  # the program reads the learning rate of the optimizer at each step
        usage = await step.usage()
    planned = {axis: steps * max(received) for axis, received in plan.bytes.items()}
    done = {axis: max(one.received[axis] for one in usage) for axis in plan.bytes}
    print(f"{plan.size} workers: loss {losses[0]:.4f} -> {losses[-1]:.4f}; bytes done = planned: {done == planned}")

    model, optimizer, schedule = parts()
    alone = []
    for x, y in data:
        alone.append(train(model, optimizer, x, y).item())
        schedule.step()
    worst = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    print(f"one process: loss {alone[0]:.4f} -> {alone[-1]:.4f}; the losses differ by at most {worst:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--strategy", default="tp", help=f"{', '.join(STRATEGIES)}, or a file of JSON")
    parser.add_argument("--axes", default="", help="names and sizes, such as dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", type=Path, help="write the strategy to this file, as JSON")
    parser.add_argument("--draw", type=Path, help="draw the plan into this file, as SVG")
    options = parser.parse_args()
    strategy, axes = chosen(options.strategy, options.axes)
    if options.write:
        options.write.write_text(strategy.to_json())
    model, optimizer, schedule = parts()
    began = time.perf_counter()
    step = captured(model, optimizer)
    plan = step.plan(strategy, axes)
    print(f"{step.describe()}\nplanned in {time.perf_counter() - began:.2f} s: {plan.describe()}")
    if options.draw:
        options.draw.write_text(plan.draw())
    aiodaft.run(main(plan, model, schedule, options.steps))
