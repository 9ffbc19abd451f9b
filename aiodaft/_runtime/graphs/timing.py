"""The times and results of the steps of a graph, for graphs that are compiled with `timed=True`.

Others have no such object: their steps call the methods themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from aiodaft._protocol.graphs.layout import ValueNote
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.tensors import kind_of


class StepTiming:
    """The time and result of the last call of a step. The method may run on the actor's thread."""

    def __init__(self) -> None:
        self._kind = ""
        self._size: int | None = None
        self._seconds: float | None = None

    @property
    def note(self) -> ValueNote:
        return ValueNote(self._kind, self._size, self._seconds)

    def around(self, fn: Callable[..., Any], *, on_thread: bool) -> Callable[..., Any]:
        """The method with a clock around it; a method that fails has made nothing."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock():
                result = fn(*args, **kwargs)
                self._kind = kind_of(result)
            return result

        async def timed_on_loop(*args: Any, **kwargs: Any) -> Any:
            with self._clock():
                result = await fn(*args, **kwargs)
                self._kind = kind_of(result)
            return result

        return timed if on_thread else timed_on_loop

    @contextmanager
    def _clock(self) -> Generator[None]:
        began = time.perf_counter()
        self._kind, self._size = "", None
        try:
            yield
        finally:
            self._seconds = time.perf_counter() - began

    def stored(self, stored: StoredValue) -> None:
        """The result is encoded; a plain one never is."""
        self._size = size_of(stored)


def size_of(stored: StoredValue) -> int:
    return len(stored.payload) + stored.size
