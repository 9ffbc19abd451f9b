"""Train a GPT that is cut in two, each half in a process of its own, next to the same GPT in one process.

    python examples/two_models.py --mode compiled

`step_of` has the whole distributed program: the calls of a step. Eager, they are made one by one; compiled, they are
captured once, and a step is one message to each half. Activations go from the first half to the second, gradients go
back, and neither passes through this process, which waits only for the losses.
"""

import argparse
import asyncio
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import byte_gpt
import torch
from byte_gpt import CONTEXT, Stage
from torch import Tensor, nn

import aiodaft

STEPS, SIZE = 20, 32
Input = Tensor | aiodaft.Ref[Tensor]


def make_half(number: int) -> tuple[Stage, torch.optim.Optimizer]:
    torch.set_num_threads(1)  # one thread adds in the same order everywhere
    half = Stage(number, 2)
    return half, adam(half)


def adam(*halves: Stage) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.ModuleList(halves).parameters(), lr=3e-3)


class Front(aiodaft.Actor):
    def __init__(self) -> None:
        self.model, self.optimizer = make_half(0)

    @aiodaft.method
    def forward(self, x_BL: Tensor) -> Tensor:
        self.output_BLD = self.model(x_BL)
        return self.output_BLD.detach()

    @aiodaft.method
    def backward(self, gradient_BLD: Tensor) -> None:
        self.optimizer.zero_grad()
        self.output_BLD.backward(gradient_BLD)
        self.optimizer.step()


class Back(aiodaft.Actor):
    def __init__(self) -> None:
        self.model, self.optimizer = make_half(1)
        self.losses: list[float] = []

    @aiodaft.method
    def forward(self, h_BLD: Tensor) -> Tensor:
        return self.model(h_BLD).detach()

    @aiodaft.method
    def learn(self, h_BLD: Tensor, y_BL: Tensor) -> Tensor:
        self.losses.append(descend(self.optimizer, self.model(h_BLD.requires_grad_()), y_BL))
        return h_BLD.grad

    @aiodaft.method
    def loss_history(self) -> list[float]:
        return self.losses


def descend(optimizer: torch.optim.Optimizer, logits_BLV: Tensor, y_BL: Tensor) -> float:
    loss = nn.functional.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of changing size and length."""
    rng = random.Random(0)
    for x_BL, y_BL in byte_gpt.batches(SIZE, steps):
        size, length = rng.randint(SIZE // 2, SIZE), rng.randint(CONTEXT // 2 + 1, CONTEXT)
        yield x_BL[:size, :length], y_BL[:size, :length]


def train_in_one(front: Stage, back: Stage) -> list[float]:
    optimizer = adam(front, back)
    return [descend(optimizer, back(front(x)), y) for x, y in batches()]


def step_of(front: Front, back: Back, mode: str) -> Callable[[Tensor, Tensor], aiodaft.Ref[None]]:
    def step(x: Input, y: Input) -> aiodaft.Ref[None]:
        gradient = back.learn(front.forward(x), y)
        return front.backward(gradient)

    return aiodaft.compile(step, timed=True) if mode == "compiled" else step


async def main(mode: str, picture: Path | None) -> None:
    whole = make_half(0)[0], make_half(1)[0]
    expected = train_in_one(*whole)
    print(f"one process:    loss {expected[0]:.4f} -> {expected[-1]:.4f}")
    async with aiodaft.Runtime() as rt, rt.spawn(Front) as front, rt.spawn(Back) as back:
        step = step_of(front, back, mode)
        for x, y in batches():
            step(x, y)
        losses = await back.loss_history()
        print(f"two processes:  loss {losses[0]:.4f} -> {losses[-1]:.4f}, {mode}")
        if isinstance(step, aiodaft.Graph) and picture:
            await step.times()
            await asyncio.to_thread(picture.write_text, step.draw())
        traffic = rt.traffic()
        print(f"the controller: {traffic.payload} payload bytes, {traffic.control // STEPS} bytes of messages a step")
        x, y = next(batches())
        output = await back.forward(front.forward(x))
        assert losses == expected
        assert torch.equal(output, whole[1](whole[0](x)))
        print(f"losses and outputs {tuple(output.shape)} are equal, bit for bit")
        try:
            await step(x, y[:, 1:])
        except ValueError:
            print(f"\nAn error in the second half, as seen where its result is needed:\n\n{traceback.format_exc()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="with --mode compiled: draw the graph and its last run, as Mermaid"
    )
    options = parser.parse_args()
    if options.draw and options.mode == "eager":
        parser.error("--draw needs --mode compiled")
    aiodaft.run(main(options.mode, options.draw))
