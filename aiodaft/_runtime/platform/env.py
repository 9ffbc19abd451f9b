"""The seam for time, randomness, identity and timeouts, so that a whole runtime can be simulated."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.resources import Gpu
from aiodaft._protocol.node.worker import PERIOD
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.gpu_claims import machine_gpus
from aiodaft._runtime.platform.threads import HelperThread


@dataclass(slots=True)
class Timeouts:
    """The times that the runtime waits, in seconds.

    Attributes:
        answer: For the answer of a process to the order to stop an actor, at least.
        report: For the answer of an actor's process to `rt.info`.
        exit_report: After a connection is lost.
        blame: For callers of a dead actor to report that its end failed their calls; else its scope gets the error.
        silence: Between two looks at a connection to a node of another machine.
    """

    answer: float = 1.0
    report: float = 1.0
    exit_report: float = 2.0
    blame: float = 0.1
    kill: float = 1.0
    fork_server_end: float = 5.0
    fork_server_look: float = 1.0
    silence: float = PERIOD


@dataclass(frozen=True, slots=True)
class Env:
    """The sources of everything that differs from run to run.

    Attributes:
        monotonic: Seconds of a clock that never jumps.
        random: Of choices that need not be secret; `token` is secret.
        thread: Makes a thread beside a loop, from the thread's name and the loop.
        remembered: The number of ended processes that are remembered.
        launcher: Takes the arguments of `WorkerLauncher`. None: that, or `ExecLauncher` where there is no fork server.
        network: See `far.Network`. None: TCP, with the key of the cluster.
    """

    monotonic: Callable[[], float] = time.monotonic
    random: random.Random = field(default_factory=random.Random)
    token: Callable[[int], bytes] = os.urandom
    gpus: Callable[[], Sequence[Gpu]] = machine_gpus
    hostname: Callable[[], str] = lambda: os.uname().nodename or "localhost"
    pid: Callable[[], int] = os.getpid
    sockets: Sockets = field(default_factory=Sockets)
    thread: Callable[[str, asyncio.AbstractEventLoop], HelperThread] = HelperThread
    remembered: int = 1024
    launcher: Callable[..., Any] | None = None
    network: Any = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def new_peer_id(self, kind: str, node: str = "") -> PeerId:
        return PeerId(f"{kind}-{self.token(6).hex()}" + (f"@{node}" if node else ""))
