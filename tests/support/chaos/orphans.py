"""Kills whole controllers, and looks whether anything survives them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final

from leaks import descendants, in_shared_memory, is_alive, left_in_shared_memory

__all__ = ["kill_a_controller"]

# Promised is one second and 40 ms per GB; a loaded machine gets more.
_PATIENCE: Final = 5.0


async def kill_a_controller(rng: random.Random, folder: Path) -> str | None:
    """Let another process torment actors of its own, kill it at any moment, and say what outlived it."""
    shared_memory = in_shared_memory()
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, Path(__file__).parent, "--seed", str(rng.randrange(1 << 30)), "--folder", folder),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await asyncio.sleep(rng.uniform(0.3, 3.0))
    children = descendants(controller.pid)
    os.kill(controller.pid, signal.SIGKILL)
    await controller.wait()
    end = time.monotonic() + _PATIENCE
    while left := [pid for pid in children if is_alive(pid)]:
        if time.monotonic() > end:
            return f"processes outlived their controller: {left}"
        await asyncio.sleep(0.01)
    if more := left_in_shared_memory(shared_memory):
        return f"shared memory outlived its controller: {sorted(more)}"
    return None
