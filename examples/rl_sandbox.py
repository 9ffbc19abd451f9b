"""The rewards of `rl_grpo.py`, by a program that may hang or crash."""

import os
import signal
from collections import abc

from rl_policy import Rollouts, reward
from rl_workers import RESTART, Worker

import aiodaft


def hang() -> None:
    while True:
        pass


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Faults = dict[tuple[int, int], str]


class Sandbox(Worker, restart=RESTART):
    """Runs a program that may hang or crash for each sample: its process then ends, and is started again."""

    def __init__(self, faults: Faults, cpu_seconds: float = 0.2, seconds: float = 60.0) -> None:
        super().__init__()
        self.faults, self.cpu_seconds, self.seconds = faults, cpu_seconds, seconds

    @aiodaft.method
    def score(self, rollouts: Rollouts, samples: abc.Sequence[int]) -> list[float]:
        with self.busy():
            return [self.score_one(rollouts, sample) for sample in samples]

    def score_one(self, rollouts: Rollouts, sample: int) -> float:
        # When one of these timers ends, the kernel ends the process, also in C code.
        signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            match self.faults.get((rollouts.chunk, sample)):
                case "hang":
                    hang()
                case "crash":
                    crash()
            return reward(*rollouts.tokens[sample].tolist())
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
