"""A small GPT and its step of training, for `tensors`; it needs torch."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "ROWS", "SIDE", "chain", "tokens", "train"]

# Of the matrices of small operations, and of a batch.
SIDE: Final = 64
ROWS: Final = 16

_VOCABULARY, _LENGTH, _WIDTH, _HEADS = 256, 64, 128, 4


class Block(nn.Module):
    """A layer of a transformer; its heads may be those of one rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of (rows, length, width)."""
        rows, length, width = x.shape
        h = self.before(x)
        parts = (one(h).view(rows, length, -1, width // _HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k, v = parts
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        given: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return given


class GPT(nn.Module):
    """A language model."""

    def __init__(self, layers: int = 2, width: int = _WIDTH) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(_VOCABULARY, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of tokens."""
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step."""
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer.step()
    optimizer.zero_grad()
    return loss


def tokens() -> tuple[Tensor, Tensor]:
    """A batch."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(_VOCABULARY, (ROWS, _LENGTH), generator=generator) for _ in range(2))
    return x, y


def chain(x: Any, y: Any, operations: int) -> Any:
    """Small operations, one after the other."""
    z = x
    for _ in range(operations // 2):
        z = z * y + x
    return z
