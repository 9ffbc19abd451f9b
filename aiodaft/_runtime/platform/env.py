"""The one seam for time, randomness and identity, so that a whole cluster can be simulated."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.platform.gpu_claims import machine_gpus
from aiodaft._runtime.platform.linux import visible_pid
from aiodaft._runtime.platform.sockets import Sockets
from aiodaft._runtime.platform.threads import HelperThread


@dataclass(frozen=True, slots=True)
class Env:
    """Where the runtime gets what differs from run to run.

    Attributes:
        monotonic: Seconds of a clock that never jumps.
        random: Source of choices that need not be secret.
        token: Random bytes that nobody can guess.
        gpus: The ids of the machine's GPUs, in the order of their numbers.
        hostname: The name of the machine.
        pid: The pid of this process.
        sockets: What connects processes.
        thread: Makes a thread beside a loop, from the thread's name and the loop.
        launcher: Starts worker processes; takes the arguments of `WorkerLauncher`. None: `WorkerLauncher`.
    """

    monotonic: Callable[[], float] = time.monotonic
    random: random.Random = field(default_factory=random.Random)
    token: Callable[[int], bytes] = os.urandom
    gpus: Callable[[], Sequence[str]] = machine_gpus
    hostname: Callable[[], str] = lambda: os.uname().nodename or "localhost"
    pid: Callable[[], int] = visible_pid
    sockets: Sockets = field(default_factory=Sockets)
    thread: Callable[[str, asyncio.AbstractEventLoop], HelperThread] = HelperThread
    launcher: Callable[..., Any] | None = None

    def new_peer_id(self, kind: str) -> PeerId:
        """An id for a process that no other process has."""
        return PeerId(f"{kind}-{self.token(6).hex()}")
