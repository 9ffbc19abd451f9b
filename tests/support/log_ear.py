"""Log records, to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy


class Ear(logging.Handler):
    """Keeps log records, of any thread, and the same formatted as the default handler does it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        self.lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        kept = copy(record)
        # It leads to frames and their variables.
        kept.exc_info = None
        self.records.append(kept)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    async def hears(self, text: str) -> str:
        """The first record with a text in it, with its traceback, as soon as it is there."""
        self._loop = asyncio.get_running_loop()
        while not (found := [line for line in self.lines if text in line]):
            self._changed.clear()
            await self._changed.wait()
        return found[0]

    async def hears_record(self, text: str) -> logging.LogRecord:
        """The same as a record."""
        return self.records[self.lines.index(await self.hears(text))]


@contextmanager
def listening(name: str = "aiodaft", level: int = logging.INFO) -> Generator[Ear, None, None]:
    """Hears everything from a level on."""
    logger, ear = logging.getLogger(name), Ear()
    before = logger.level
    logger.addHandler(ear)
    logger.setLevel(level)
    try:
        yield ear
    finally:
        logger.setLevel(before)
        logger.removeHandler(ear)
