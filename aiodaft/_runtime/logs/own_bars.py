"""Bars that the program itself shows by tqdm: they stay the last lines of the terminal."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO


def are_shown() -> bool:
    """Whether there are any."""
    bars = _bars()
    if bars is None:
        return False
    with bars.get_lock():
        return any(bar.fp in (sys.stdout, sys.stderr) for bar in bars._instances)


def aside(target: TextIO) -> AbstractContextManager[object]:
    """Take them away while something else is written."""
    bars = _bars()
    return nullcontext() if bars is None else bars.external_write_mode(target)


def _bars() -> Any:
    """The class that knows them; None if there are none.

    The first bar makes the lock of all. From Python 3.14 on that lock starts a process.
    """
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bars if bars is not None and bars._instances else None
