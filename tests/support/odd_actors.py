"""Actors that do rare things."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiodaft
from aiodaft import Actor, method


class Parent(Actor):
    """Starts processes of its own."""

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    def fork_a_family(self) -> tuple[int, int]:
        """A child and a grandchild that hold every descriptor of this process."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            grandchild = os.fork()
            if grandchild:
                os.write(writing, str(grandchild).encode())
            signal.pause()
            os._exit(0)
        return child, int(os.read(reading, 20))

    @method
    def start_in_background(self) -> int:
        """A child of a shell that ends at once."""
        command = "sleep 60 >/dev/null & echo $!"
        return int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout)

    @method
    def start_a_daemon(self) -> int:
        """A process with a session of its own, as daemons have."""
        process = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, start_new_session=True)
        # This process does not wait for it, which Python would warn of.
        process.returncode = 0
        return process.pid

    @method
    def hold_interpreter(self) -> None:
        """In C, without letting any other thread of this process run."""
        ctypes.PyDLL(None).sleep(60)


class Unreadable:
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Odd(Actor):
    """Gives away objects that should stay."""

    @method
    async def kind(self, value: Any) -> str:
        return type(value).__name__

    @method
    async def myself(self) -> Any:
        return self

    @method
    async def every_second_unreadable(self, count: int) -> AsyncIterator[Any]:
        for index in range(count):
            yield Unreadable() if index % 2 else index

    @method
    async def push(self, channel: aiodaft.Channel[bytes], count: int, size: int) -> None:
        for _ in range(count):
            await channel.send(bytes(size))

    @method
    async def pull(self, channel: aiodaft.Channel[bytes], count: int) -> int:
        received = 0
        async for item in channel:
            received += len(item)
            count -= 1
            if not count:
                break
        return received
