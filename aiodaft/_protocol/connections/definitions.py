"""The classes and functions that the two ends of a connection have told each other. Pure.

A class or function that a process cannot import is sent once over each connection, under a name. Later values only have
the name. The sender takes the name back when its class or function is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

T = TypeVar("T")


class Definitions(Generic[T]):
    """The names that are known at each end."""

    def __init__(self) -> None:
        self._told: set[bytes] = set()
        # Is replaced, and never changed: a value that arrives keeps the definitions of that moment, until it is
        # decoded.
        self.heard: Mapping[bytes, T] = MappingProxyType({})
        # By name, how often it was told and not taken back: a name may be told again before it is known to be taken
        # back.
        self._times: Counter[bytes] = Counter()

    def tell(self, name: bytes) -> bool:
        """Whether the other end has to be told the definition of this name, before a value that uses it."""
        if name in self._told:
            return False
        self._told.add(name)
        return True

    def take_back(self, name: bytes) -> bool:
        """No later value uses this name: whether the other end has to be told."""
        if name not in self._told:
            return False
        self._told.remove(name)
        return True

    def hear(self, name: bytes, definition: T) -> None:
        self._times[name] += 1
        if name not in self.heard:
            self.heard = MappingProxyType({**self.heard, name: definition})

    def forget(self, name: bytes) -> None:
        self._times[name] -= 1
        if not self._times[name]:
            del self._times[name]
            self.heard = MappingProxyType({known: kept for known, kept in self.heard.items() if known != name})
