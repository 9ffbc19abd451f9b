"""Classes that know nothing of aiodaft, with every kind of attribute; importable in workers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any


class Base:
    """Has attributes that a class inherits."""

    def __init__(self, gain: int = 2) -> None:
        self.gain = gain
        self.closed_streams = 0

    def scale(self, value: int) -> int:
        return self.gain * value

    def _hidden(self) -> None: ...


class Engine(Base):
    """Everything that a class can have."""

    def scale(self, value: int) -> int:
        return self.gain * value + 1

    async def scale_later(self, value: int) -> int:
        return self.gain * value

    async def words(self, text: str) -> AsyncIterator[str]:
        try:
            for word in text.split():
                yield word
        finally:
            self.closed_streams += 1

    def letters(self, text: str) -> Iterator[str]:
        try:
            yield from text
        finally:
            self.closed_streams += 1

    def __call__(self, value: int) -> str:
        return f"called with {value}"

    _call_impl = __call__

    @staticmethod
    def count(text: str) -> int:
        return len(text)

    @staticmethod
    async def count_later(text: str) -> int:
        return len(text)

    @classmethod
    def kind(cls, suffix: str = "") -> str:
        return cls.__name__ + suffix

    @property
    def doubled(self) -> int:
        return 2 * self.gain

    @property
    def thread(self) -> str:
        return threading.current_thread().name

    def __len__(self) -> int:
        return self.gain


class Connection:
    """A context manager that notes in a file how it is used."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, what: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{what} on {threading.current_thread().name}\n")

    def __enter__(self) -> str:
        self.note("entered")
        return "something else"

    def __exit__(self, *exc_info: object) -> None:
        self.note("left")


class BothWays(Connection):
    """Is an async context manager, too."""

    async def __aenter__(self) -> Any:
        self.note("entered later")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.note("left later")
