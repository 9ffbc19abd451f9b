"""The workers of `rl_grpo.py` that compute with a policy, besides its trainers. They know nothing of modes."""

import asyncio
import copy
import random
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
    weights_of,
)
from torch import Tensor, nn

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


class NoWeights(Exception):
    """A generator has been started again, and has the weights of the beginning."""


RESTART = aiodaft.Restart(intensity=100, period=60, backoff=aiodaft.Backoff(base=0.01, max=0.1))


class Generator(Worker, restart=RESTART):
    def __init__(self, model: str, seed: int, tail: float = 0.0) -> None:
        super().__init__()
        self.seed, self.tail, self.has_weights = seed, tail, True
        self.current = 0, nn.ModuleDict({"policy": make_policy(model, seed)})

    async def on_restart(self, epoch: int) -> None:
        self.has_weights = False

    @aiodaft.method
    async def load(self, weights: Weights, version: int) -> int:
        """Switch to other weights, also in the middle of answers, which go on from the tokens that they have."""
        parts = copy.deepcopy(self.current[1])  # tokens that are being chosen keep theirs
        parts.load_state_dict(weights, strict=False)  # parameters that are one have one name among the weights
        if version >= self.current[0]:
            self.current = version, parts  # one assignment: each token is of one version
        self.has_weights = True
        return digest(weights_of(parts))

    @aiodaft.method
    async def rollout(self, chunk: int) -> Rollouts:
        """Answer the prompts of a chunk, which depend on the seed and its number only."""
        if not self.has_weights:
            raise NoWeights
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
        version, parts = self.current
        with self.busy():
            logps_BV = parts["policy"](tokens_BL)[:, -1].log_softmax(-1)
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
