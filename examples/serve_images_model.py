"""The model of `serve_images.py`: sees an image, and writes its caption. It learns from drawn images in seconds."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from serve_model import WIDTH, ByteGPT, Weights, learn, no_past
from torch import Tensor, nn

SIDE, PLACES = 32, 16
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
SHAPES = "square", "ring", "cross"
END = ord("\n")

Image = Tensor  # (3, SIDE, SIDE)


def drawn(rng: random.Random) -> tuple[Image, bytes]:
    """A shape somewhere, and its caption."""
    color, shape, y, x = rng.choice([*COLORS]), rng.choice(SHAPES), rng.randrange(6, 26), rng.randrange(6, 26)
    down, right = (torch.arange(SIDE)[:, None] - y).abs(), (torch.arange(SIDE) - x).abs()
    within, inner, bars = (down < 6) & (right < 6), (down < 4) & (right < 4), (down < 2) | (right < 2)
    mask = {"square": within, "ring": within & ~inner, "cross": within & bars}[shape]
    where = f"{'top' if y < SIDE / 2 else 'bottom'} {'left' if x < SIDE / 2 else 'right'}"
    return mask * torch.tensor(COLORS[color]).float()[:, None, None], f"a {color} {shape}, {where}\n".encode()


class Eyes(nn.Sequential):
    """Makes images (B, 3, SIDE, SIDE) to embeddings (B, PLACES, C), which come before the text."""

    def __init__(self) -> None:
        sizes = (3, WIDTH // 2, WIDTH, WIDTH)
        halvings = [(nn.Conv2d(a, b, 3, 2, 1), nn.GELU()) for a, b in pairwise(sizes)]
        super().__init__(*(part for halving in halvings for part in halving), nn.Conv2d(WIDTH, WIDTH, 1), nn.Flatten(2))
        self.places = nn.Parameter(torch.randn(PLACES, WIDTH) / 2)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).transpose(1, 2) + self.places


class Prefilled(NamedTuple):
    """The token after a text, and the keys and values of the text (L, 2, 1, H, T, D)."""

    token: int
    kv: Tensor


class Captioner(nn.Module):
    def __init__(self, weights: Weights | None = None) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        torch.manual_seed(0)
        super().__init__()
        self.eyes, self.text = Eyes(), ByteGPT()
        if weights is not None:
            self.load_state_dict(weights)

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor:
        return self.eyes(image[None])

    def prefill(self, seen: Tensor) -> Prefilled:
        return self.step(seen, no_past(self.text, 1)[0])

    def decode(self, last: Prefilled) -> Prefilled:
        return self.step(self.text.bytes(torch.tensor([[last.token]])), last.kv)

    @torch.inference_mode()
    def step(self, x_1TC: Tensor, past: Tensor) -> Prefilled:
        """The most likely token after the embedded ones, and the keys and values of all so far."""
        new: list[Tensor] = []
        logits_1V = self.text.layers(x_1TC, past, torch.tensor([past.shape[4]]), new.append)[:, -1]
        return Prefilled(int(logits_1V.argmax()), torch.cat([past, torch.stack(new)], 4))

    def caption(self, image: Image) -> bytes:
        """The caption that the pools have to give."""
        last, text = self.prefill(self.encode(image)), bytearray()
        while last.token != END:
            text.append(last.token)
            last = self.decode(last)
        return bytes(text)


def train(steps: int) -> Weights:
    model, rng = Captioner(), random.Random(0)

    def losses() -> Iterator[Tensor]:
        for _ in range(steps):
            images, captions = zip(*(drawn(rng) for _ in range(32)), strict=True)
            longest = max(map(len, captions))
            tokens_BT = torch.tensor([list(caption.ljust(longest, b"\n")) for caption in captions])
            x_BTC = torch.cat([model.eyes(torch.stack(images)), model.text.bytes(tokens_BT[:, :-1])], 1)
            logits_BTV = model.text.layers(x_BTC, *no_past(model.text, len(images)), lambda _: None)[:, PLACES - 1 :]
            yield nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())

    return learn(model, losses(), steps)
