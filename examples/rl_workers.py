"""The workers of `rl_grpo.py` besides its trainers: generator, reference and sandbox. They know nothing of modes."""

import asyncio
import copy
import os
import random
import signal
import time
from collections import abc
from contextlib import contextmanager

import torch
from rl_policy import (
    ANSWER,
    GROUP,
    PROMPT,
    PROMPTS,
    SAMPLES,
    Rollouts,
    Weights,
    digest,
    log_probabilities,
    make_policy,
    of_tokens,
    reward,
    weights_of,
)
from torch import Tensor

import aiodaft


class Worker(aiodaft.Actor):
    """Keeps account of when it is busy."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    @contextmanager
    def busy(self) -> abc.Generator[None]:
        began = time.monotonic()  # one clock for all processes of a machine
        try:
            yield
        finally:
            self.spans.append((began, time.monotonic()))

    @aiodaft.method
    async def busy_spans(self) -> list[tuple[float, float]]:
        return self.spans


class Generator(Worker):
    def __init__(self, model: str, seed: int, tail: float = 0.0) -> None:
        super().__init__()
        self.seed, self.tail = seed, tail
        self.current = 0, make_policy(model, seed)

    @aiodaft.method
    async def load(self, weights: Weights, version: int) -> str:
        """Switch to other weights, also in the middle of answers, which go on from the tokens that they have."""
        policy = copy.deepcopy(self.current[1])  # tokens that are being chosen keep theirs
        policy.load_state_dict(weights, strict=False)  # parameters that are one have one name among the weights
        self.current = version, policy  # one assignment: each token is of one version
        return digest(weights_of(policy))

    @aiodaft.method
    async def rollout(self, chunk: int) -> Rollouts:
        """Answer the prompts of a chunk, which depend on the seed and its number only."""
        rng = torch.Generator().manual_seed(1_000_003 * self.seed + chunk)
        tokens_BL = torch.randint(8, (PROMPTS, PROMPT), generator=rng).repeat_interleave(GROUP, 0)
        logps, versions = [], []
        for place in range(ANSWER):
            if place > 0:
                await self.before_next_token(chunk)
            chosen_B1, logps_B1, version = await asyncio.to_thread(self.next_tokens, tokens_BL, rng)
            tokens_BL = torch.cat([tokens_BL, chosen_B1], 1)
            logps.append(logps_B1)
            versions.append(torch.full((SAMPLES, 1), version))
        return Rollouts(chunk, tokens_BL, torch.cat(logps, 1), torch.cat(versions, 1))

    async def before_next_token(self, chunk: int) -> None:
        # A long tail: one chunk in eight takes longer, as with a slow tool.
        if self.tail and random.Random(chunk).random() < 1 / 8:
            await asyncio.sleep(self.tail)

    @torch.no_grad()
    def next_tokens(self, tokens_BL: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, int]:
        version, policy = self.current
        with self.busy():
            logps_BV = policy(tokens_BL)[:, -1].log_softmax(-1)
            chosen_B1 = torch.multinomial(logps_BV.exp(), 1, generator=rng)
            return chosen_B1, logps_BV.gather(1, chosen_B1), version


class Reference(Worker):
    """The policy before training, from which GRPO and PPO keep the trained one from going far."""

    def __init__(self, model: str, seed: int) -> None:
        super().__init__()
        self.policy = make_policy(model, seed)

    # Not in the order of the calls: one whose samples are not generated yet would hold up all after it.
    @aiodaft.method(ordered=False)
    @torch.no_grad()
    def log_probabilities(self, rollouts: Rollouts) -> Tensor:
        with self.busy():
            return of_tokens(log_probabilities(self.policy, rollouts.tokens), rollouts.tokens)


def hang() -> None:
    while True:
        pass


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Faults = dict[tuple[int, int], str]


class Sandbox(Worker, restart=aiodaft.Restart(intensity=100, period=60, backoff=aiodaft.Backoff(base=0.01, max=0.1))):
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
