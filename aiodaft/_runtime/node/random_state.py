"""The random numbers of a worker: those of Python, and of numpy and torch if it has loaded them."""

from __future__ import annotations

import random
import sys
from typing import Any


def part_from_parent() -> None:
    """In a forked process: leave the states that its parent and its siblings have. Python leaves its own."""
    numpy, torch = _loaded()
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.default_generator.seed()


def repeat(seed: int, label: str, epoch: int) -> int:
    """Seed all three for an incarnation of an actor. Returns the seed for the actors that it spawns."""
    own = random.Random(f"{seed} {label} {epoch}").getrandbits(63)
    random.seed(own)
    numpy, torch = _loaded()
    if numpy is not None:
        numpy.seed(own % (1 << 32))
    if torch is not None:
        torch.manual_seed(own)
    return own


def _loaded() -> tuple[Any, Any]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return getattr(numpy, "random", None), torch if hasattr(torch, "default_generator") else None
