"""Train a GPT that is cut in two, each half in a process of its own, next to the same GPT in one process.

`train_in_two` is the whole distributed program: it makes the calls in order, and waits only for the losses.
Activations go from the first half to the second, gradients go back, and neither passes through this process.
"""

import random
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import aiodaft

WIDTH, HEADS, CONTEXT, STEPS = 64, 4, 128, 60


class Blocks(nn.Module):
    # Two transformer blocks in which each byte sees the bytes before it.
    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(2))

    def forward(self, x_BLD: Tensor) -> Tensor:
        mask_LL = nn.Transformer.generate_square_subsequent_mask(x_BLD.shape[1])
        for layer in self.layers:
            x_BLD = layer(x_BLD, src_mask=mask_LL, is_causal=True)
        return x_BLD


class FrontHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        set_up_torch(seed=1)
        self.bytes, self.places, self.blocks = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH), Blocks()

    def forward(self, x_BL: Tensor) -> Tensor:
        return self.blocks(self.bytes(x_BL) + self.places.weight[: x_BL.shape[1]])


class BackHalf(nn.Sequential):
    def __init__(self) -> None:
        set_up_torch(seed=2)
        super().__init__(Blocks(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def set_up_torch(seed: int) -> None:
    torch.manual_seed(seed)
    # One thread adds in the same order everywhere, so that results can be compared bit for bit.
    torch.set_num_threads(1)


def adam(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()], lr=3e-3)


class Front(aiodaft.Actor):
    def __init__(self) -> None:
        self.model = FrontHalf()
        self.optimizer = adam(self.model)

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
        self.model = BackHalf()
        self.optimizer = adam(self.model)
        self.losses: list[float] = []

    @aiodaft.method
    def forward(self, h_BLD: Tensor) -> Tensor:
        return self.model(h_BLD).detach()

    @aiodaft.method
    def learn(self, h_BLD: Tensor, y_BL: Tensor) -> Tensor | None:
        self.losses.append(step(self.optimizer, self.model(h_BLD.requires_grad_()), y_BL))
        return h_BLD.grad

    @aiodaft.method
    def loss_history(self) -> list[float]:
        return self.losses


def step(optimizer: torch.optim.Optimizer, logits_BLV: Tensor, y_BL: Tensor) -> float:
    loss = nn.functional.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of changing size and length, from the sources of Python's standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources)))
    rng = random.Random(0)
    for _ in range(steps):
        size, length = rng.randint(4, 16), rng.randint(CONTEXT // 2, CONTEXT)
        rows = torch.stack([text[start : start + length + 1] for start in rng.sample(range(len(text) - length), size)])
        yield rows[:, :-1], rows[:, 1:]


def train_in_one(front: nn.Module, back: nn.Module) -> list[float]:
    optimizer = adam(front, back)
    return [step(optimizer, back(front(x)), y) for x, y in batches()]


async def train_in_two(front: Front, back: Back, data: Iterator[tuple[Tensor, Tensor]]) -> list[float]:
    for x, y in data:
        gradient = back.learn(front.forward(x), y)
        front.backward(gradient)
    return await back.loss_history()


async def main() -> None:
    whole = FrontHalf(), BackHalf()
    expected = train_in_one(*whole)
    print(f"one process:    loss {expected[0]:.4f} -> {expected[-1]:.4f}")
    async with aiodaft.Runtime() as rt, rt.spawn(Front) as front, rt.spawn(Back) as back:
        losses = await train_in_two(front, back, batches())
        print(f"two processes:  loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        traffic = rt.traffic()
        print(f"the controller: {traffic.payload} payload bytes, {traffic.control // STEPS} bytes of messages a step")
        x, _ = next(batches())
        y = await back.forward(front.forward(x))
        assert losses == expected
        assert torch.equal(y, whole[1](whole[0](x)))
        print(f"losses and outputs {tuple(y.shape)} are equal, bit for bit")
        try:
            await front.backward(back.learn(torch.zeros(2, 3, WIDTH + 1), torch.zeros(2, 3)))
        except RuntimeError:
            print(f"\nAn error in the second half, as seen where its result is needed:\n\n{traceback.format_exc()}")


if __name__ == "__main__":
    aiodaft.run(main())
