"""What is logged, to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager


class Ear(logging.Handler):
    """Keeps what the package logs, formatted as the default handler does it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self._changed.set()

    async def hears(self, text: str) -> str:
        """The first record with a text in it, with its traceback, as soon as it is there."""
        while not (found := [line for line in self.lines if text in line]):
            self._changed.clear()
            await self._changed.wait()
        return found[0]


@contextmanager
def listening() -> Generator[Ear, None, None]:
    """Hears everything from the level INFO on."""
    logger, ear = logging.getLogger("aiodaft"), Ear()
    level = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    try:
        yield ear
    finally:
        logger.setLevel(level)
        logger.removeHandler(ear)
