"""Calls with small values, and of a `def` method, each next to the call of an `async def` method with an integer.

A dataclass of `__main__` is next to one of a module, and twenty tensors are next to one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, make_dataclass
from functools import partial
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Echo, payload
from .results import Bench, seconds_of_one

_REPEATS: Final = 200


@dataclass
class Settings:
    """A dataclass of a module."""

    name: str = "a"
    rate: float = 0.5
    steps: int = 3


async def run(bench: Bench) -> None:
    """Measure calls with small values."""
    tensor, tensors = payload(1 << 10), [payload(16) for _ in range(20)]
    settings = Settings()
    # As if it was a class of `__main__`: no process can import it.
    own = make_dataclass("Own", ["name", "rate", "steps"])("a", 0.5, 3)
    async with Runtime() as rt:
        actor = await rt.spawn(Echo)
        lines: list[tuple[str, str, Callable[[], Awaitable[object]]]] = [
            ("a `def` method", "<= 1.7", lambda: actor.on_thread(1)),
            ("a list", "<= 1.2", lambda: actor.drop([1, 2, 3])),
            ("a tuple", "<= 1.2", lambda: actor.drop((1, "a", None))),
            ("a dict", "<= 1.2", lambda: actor.drop({"a": 1, "b": 2.5})),
            ("a keyword argument", "<= 1.2", lambda: actor.drop(value=1)),
            ("a dataclass", "<= 1.2", lambda: actor.drop(settings)),
            ("a dataclass, there and back", "", lambda: actor.on_loop(settings)),
            ("1 KiB", "<= 1.5", lambda: actor.drop(tensor)),
            ("1 KiB, there and back", "<= 2.0", lambda: actor.on_loop(tensor)),
        ]
        floor = partial(seconds_of_one, lambda: actor.drop(1), _REPEATS)
        for name, budget, call in lines:
            ours = partial(seconds_of_one, call, _REPEATS)
            await bench.compare(f"call with {name}", ours, floor, "call with an int", budget)
        ours, floor = (partial(seconds_of_one, partial(actor.drop, value), _REPEATS) for value in (tensors, tensors[0]))
        await bench.compare("call with twenty small tensors", ours, floor, "call with one", "<= 3.0")
        for name, method in (("", actor.drop), (", there and back", actor.on_loop)):
            ours, floor = (partial(seconds_of_one, partial(method, one), _REPEATS) for one in (own, settings))
            label = f"call with a dataclass of __main__{name}"
            await bench.compare(label, ours, floor, f"call with one of a module{name}", "<= 1.5")
