"""The trainer of `rl_grpo.py`: the losses of GRPO and PPO, and the age of the training data."""

from dataclasses import dataclass

import torch
from rl_policy import (
    GROUP,
    PROMPT,
    PROMPTS,
    Rollouts,
    Weights,
    WindowModel,
    digest,
    log_probabilities,
    make_policy,
    of_tokens,
    weights_of,
)
from rl_workers import Worker
from torch import Tensor

import aiodaft

CLIP, ENTROPY, KL = 0.2, 0.05, 0.005

# A chunk that can be learned from: its samples, their rewards (NaN: dropped), and the reference's log-probabilities.
Experience = tuple[Rollouts, list[float], Tensor]


@dataclass
class Ages:
    """Of the training data: the versions by which its oldest token was old, and the answers of several versions."""

    oldest: int = 0
    resumed: int = 0


class Trainer(Worker):
    def __init__(self, model: str, algorithm: str, seed: int, learning_rate: float, staleness: int) -> None:
        super().__init__()
        self.policy = make_policy(model, seed)
        self.critic = WindowModel(outputs=1) if algorithm == "ppo" else None
        parts = [self.policy] if self.critic is None else [self.policy, self.critic]
        self.parameters = [parameter for part in parts for parameter in part.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate)
        self.staleness, self.version = staleness, 0
        self.ages = Ages()

    @aiodaft.method
    def gradient(self, batch: list[Experience], samples: int) -> Tensor:
        """This member's part of the gradient of the mean loss of all members' samples, as one vector."""
        with self.busy():
            self.optimizer.zero_grad()
            for rollouts, rewards, reference_BA in batch:
                self.check_staleness(rollouts.versions)
                self.loss(rollouts, torch.tensor(rewards), reference_BA).div(samples).backward()
            return torch.cat([parameter.grad.flatten() for parameter in self.parameters])

    def check_staleness(self, versions_BA: Tensor) -> None:
        ages_BA = self.version - versions_BA
        if ages_BA.min() < 0 or ages_BA.max() > self.staleness:
            raise AssertionError(f"at version {self.version}, tokens of versions {versions_BA.unique().tolist()}")
        self.ages.oldest = max(self.ages.oldest, int(ages_BA.max()))
        self.ages.resumed += int((versions_BA != versions_BA[:, :1]).any(1).sum())

    def loss(self, rollouts: Rollouts, rewards_B: Tensor, reference_BA: Tensor) -> Tensor:
        """The sum of the losses of the samples that were not dropped."""
        tokens_BL, kept_B = rollouts.tokens, ~rewards_B.isnan()
        all_BAV = log_probabilities(self.policy, tokens_BL)
        logps_BA = of_tokens(all_BAV, tokens_BL)
        baseline_B, known_B = self.baseline(tokens_BL, rewards_B), rewards_B.nan_to_num()
        advantages_B1 = (known_B - baseline_B.detach())[:, None]
        ratio_BA = (logps_BA - rollouts.logps).exp()
        clipped_BA = ratio_BA.clamp(1 - CLIP, 1 + CLIP)
        gain_BA = torch.minimum(ratio_BA * advantages_B1, clipped_BA * advantages_B1)
        kl_BA = (reference_BA - logps_BA).exp() - (reference_BA - logps_BA) - 1  # Schulman's estimator k3
        entropy_BA = -(all_BAV.exp() * all_BAV).sum(2)
        loss_B = (KL * kl_BA - gain_BA - ENTROPY * entropy_BA).mean(1) + (baseline_B - known_B) ** 2
        return loss_B[kept_B].sum()

    def baseline(self, tokens_BL: Tensor, rewards_B: Tensor) -> Tensor:
        """GRPO: the mean reward of the answers to the same prompt; PPO: the critic's estimate, which learns too."""
        if self.critic is None:
            return rewards_B.view(PROMPTS, GROUP).nanmean(1).nan_to_num().repeat_interleave(GROUP)
        return self.critic(tokens_BL[:, :PROMPT])[:, -1, 0]

    @aiodaft.method
    def step(self, gradient: Tensor) -> str:
        with self.busy():
            sizes = [parameter.numel() for parameter in self.parameters]
            for parameter, part in zip(self.parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self.optimizer.step()
            self.version += 1
            return digest(weights_of(self.policy))

    @aiodaft.method
    def weights(self) -> Weights:
        return weights_of(self.policy)

    @aiodaft.method
    def ages_seen(self) -> Ages:
        return self.ages
