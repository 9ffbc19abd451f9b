"""The output on the terminal of a test."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest


class Terminal:
    """The output here up to now."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.out = self.err = ""

    async def shows(self, *, out: str = "", err: str = "") -> None:
        """Wait until there is something to be seen."""
        while out not in self.out or err not in self.err:
            await asyncio.sleep(0)
            self.look()

    def look(self) -> None:
        """See the present output."""
        # `readouterr` would cut off text that is printed between its read and its truncate.
        capture: Any = self._capfd._capture  # noqa: SLF001 - there is no other way to its files
        self.out, self.err = (_content(one.tmpfile.fileno()) for one in (capture.out, capture.err))


def _content(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode()
