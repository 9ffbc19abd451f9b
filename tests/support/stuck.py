"""Actors that stop answering, or only seem to."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from typing import Any

from aiodaft import Actor, Patience, method


def wait_for_file(path: str) -> None:
    exists = os.path.exists
    while not exists(path):
        pass


class Stuck(Actor):
    """Is busy in every way there is."""

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    async def stop_itself(self) -> str:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "continued"

    @method
    def hold_interpreter(self, until: str) -> str:
        """In C, until the test writes to a fifo, without letting any other thread of this process run."""
        library = ctypes.PyDLL(None)
        library.close(library.open(until.encode(), os.O_RDONLY))
        return "free again"

    @method
    async def block_loop(self, until: str) -> str:
        """In Python, until a file exists: other threads run, the loop does not."""
        wait_for_file(until)
        return "free again"

    @method
    async def block_loop_later(self, until: str) -> None:
        """The same in a callback, when the call is over."""
        asyncio.get_running_loop().call_soon(wait_for_file, until)


class Unhurried(Stuck, patience=Patience(suspect_after=None, lost_after=None, give_up=None)):
    """Says in its class line that it may be silent for any time."""
