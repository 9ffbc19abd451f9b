"""The one seam for time, randomness and identity, so that a whole cluster can be simulated."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.platform.gpu_claims import machine_gpus


@dataclass(frozen=True, slots=True)
class Env:
    """Where the runtime gets what differs from run to run.

    Attributes:
        monotonic: Seconds of a clock that never jumps.
        random: Source of choices that need not be secret.
        token: Random bytes that nobody can guess.
        gpus: The ids of the machine's GPUs, in the order of their numbers.
    """

    monotonic: Callable[[], float] = time.monotonic
    random: random.Random = field(default_factory=random.Random)
    token: Callable[[int], bytes] = os.urandom
    gpus: Callable[[], Sequence[str]] = machine_gpus

    def new_peer_id(self, kind: str) -> PeerId:
        """An id for a process that no other process has."""
        return PeerId(f"{kind}-{self.token(6).hex()}")
