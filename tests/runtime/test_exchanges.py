"""The exchanges of a block, which threads begin while it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

from aiodaft._runtime.groups.exchanges import Exchanges
from aiodaft.exceptions import CallCancelled


class Pending:
    """A result that has not come."""

    cancelled = False

    def cancel(self, _: str) -> None:
        self.cancelled = True


class Watched(WeakSet[Any]):
    """While it is read, another thread has time to begin an exchange."""

    def __init__(self, begins: threading.Thread) -> None:
        super().__init__()
        self._begins = begins

    def __iter__(self) -> Iterator[Any]:
        for found in super().__iter__():
            yield found
            if self._begins.ident is None:
                self._begins.start()
                self._begins.join(0.05)


def test_an_exchange_that_begins_while_the_block_ends_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted: Any = SimpleNamespace(_process=None)
    standing: Any = None
    pending: list[Any] = [Pending() for _ in range(9)]
    begins = threading.Thread(target=lambda: exchanges.begun(pending[-1]))
    monkeypatch.setattr("aiodaft._runtime.groups.exchanges.WeakSet", partial(Watched, begins))
    exchanges = Exchanges(hosted, standing, (), "a block")
    for one in pending[:-1]:
        exchanges.begun(one)
    exchanges.end(CallCancelled("the block is over"))
    begins.join()
    assert all(one.cancelled for one in pending)
