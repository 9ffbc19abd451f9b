"""Checks of numbers that users give, numbers as people read them, tables of states, tables that forget. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeGuard, TypeVar


def amount(size: int) -> str:
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


K = TypeVar("K")
V = TypeVar("V")


class Latest(dict[K, V]):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def next_state(transitions: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT) -> StateT:
    try:
        return transitions[state, event]
    except KeyError:
        raise ValueError(f"{event} cannot happen in {state}") from None


_LARGEST: Final = sys.float_info.max


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = 0, most: float = _LARGEST) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
