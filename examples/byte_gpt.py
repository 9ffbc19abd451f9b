"""A small GPT over bytes that can be cut into stages anywhere, and text for it; for other examples."""

import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

WIDTH, HEADS, CONTEXT, LAYERS, STEPS = 32, 4, 64, 8, 6


class Stage(nn.Module):
    """Some layers of the model. Every cut gives the same model."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        torch.manual_seed(1000)
        self.bytes = nn.Embedding(256, WIDTH) if self.first else None
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH)) if self.first else None
        layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.layers = nn.ModuleList(layer(seed) for seed in layers)
        torch.manual_seed(2000)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)) if self.last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bytes is not None and self.places is not None:
            x = self.bytes(x) + self.places[: x.shape[1]]
        mask_LL = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask_LL, is_causal=True)
        return x if self.head is None else self.head(x)


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)


@cache
def text() -> Tensor:
    """Sources of Python's standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in sources)))


def batches(
    size: int, steps: int | None = None, seed: int | str = 0, data: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches of the text, or of other bytes: bytes, and the byte that follows each."""
    rng, data = random.Random(seed), text() if data is None else data
    for _ in range(STEPS if steps is None else steps):
        starts = rng.sample(range(len(data) - CONTEXT), size)
        rows = torch.stack([data[i : i + CONTEXT + 1] for i in starts])
        yield rows[:, :-1], rows[:, 1:]
