"""The interface of a coordinator's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiodaft._protocol.coordination.records import Change
from aiodaft._protocol.coordination.registry import Stored


class StoreFailed(Exception):
    """The store cannot be reached or written. It is not known whether the last changes are stored."""


class NotStored(StoreFailed):
    """Nothing was stored, and this coordinator still is in charge: the disk is full, or there is no thread."""


class Deposed(Exception):
    """Another coordinator has opened the store since, and is in charge: nothing was stored."""


class Store(Protocol):
    """Keeps the records of a coordinator. One coordinator at a time is in charge of it: the last that opened it."""

    async def open(self) -> Stored:
        """Take charge, with a new term, and return the records. After `StoreFailed`: read them again.

        Raises:
            StoreFailed: It cannot be reached.
            Deposed: It was opened by this object before, and by another one since; or it can have one user only.
            CorruptState: It is no store of a coordinator, or is damaged.
        """
        ...

    async def commit(self, changes: Sequence[Change]) -> None:
        """Store changes, all or none. Without changes: find out whether this coordinator is in charge.

        Raises:
            StoreFailed: It is not known which of them are stored; if not all, then the first ones.
            NotStored: None of them is, and it can be tried again.
            Deposed: None of them is.
        """
        ...

    async def lost(self) -> None: ...

    async def aclose(self) -> None: ...
