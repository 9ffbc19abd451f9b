"""The trainers of `rl_grpo.py`: the losses of GRPO and PPO, the age of the training data, and who has which rows."""

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
    rows_of,
    weights_of,
)
from rl_workers import Worker
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import aiodaft

CLIP, ENTROPY, KL = 0.2, 0.05, 0.005

# A chunk that can be learned from: its samples, their rewards (NaN: dropped), and the reference's log-probabilities.
Experience = tuple[Rollouts, list[float], Tensor]


@dataclass
class Ages:
    """Of the training data: the versions by which its oldest token was old, and the answers of several versions."""

    allowed: int
    oldest: int = 0
    resumed: int = 0

    def check(self, versions_BA: Tensor, now: int) -> None:
        ages_BA = now - versions_BA
        if ages_BA.min() < 0 or ages_BA.max() > self.allowed:
            raise AssertionError(f"at version {now}, tokens of versions {versions_BA.unique().tolist()}")
        self.oldest = max(self.oldest, int(ages_BA.max()))
        self.resumed += int((versions_BA != versions_BA[:, :1]).any(1).sum())


def learned(model: str, algorithm: str, seed: int) -> nn.ModuleDict:
    parts = {"policy": make_policy(model, seed)}
    return nn.ModuleDict(parts | ({"critic": WindowModel(outputs=1)} if algorithm == "ppo" else {}))


class Trainer(Worker):
    """Computes with all weights on its part of a batch; has some rows of each, and the optimizer's state of these."""

    def __init__(self, model: str, algorithm: str, seed: int, learning_rate: float, staleness: int) -> None:
        super().__init__()
        parts, group = learned(model, algorithm, seed), aiodaft.current_group()
        self.policy, self.critic = parts["policy"], dict(parts.items()).get("critic")
        self.weights, self.layout, self.rank = weights_of(parts), rows_of(weights_of(parts), group.size), group.rank
        self.parameters = dict(parts.named_parameters())
        # Views of the weights, in which the optimizer changes them.
        self.rows = {name: nn.Parameter(part) for name, part in self.layout.shard(self.weights, group.rank).items()}
        self.optimizer = torch.optim.Adam(self.rows.values(), lr=learning_rate)
        self.version, self.ages = 0, Ages(staleness)

    @aiodaft.method
    def gradient(self, batch: list[Experience], samples: int) -> Tensor:
        """The gradient of this member's part of the mean loss of all samples; row i is that of the rows of member i."""
        with self.busy():
            for parameter in self.parameters.values():
                parameter.grad = None
            for rollouts, rewards, reference_BA in batch:
                self.ages.check(rollouts.versions, self.version)
                self.loss(rollouts, torch.tensor(rewards), reference_BA).div(samples).backward()
            gradients = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
            ranks = range(self.layout.size)
            of_rank = (self.layout.shard(gradients, rank).values() for rank in ranks)
            # Of equal length, so that each member gets one.
            return pad_sequence([torch.cat([part.flatten() for part in parts]) for parts in of_rank], batch_first=True)

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
    def step(self, gradient: Tensor) -> int:
        """Change the rows of this member; returns the digest of those of the policy."""
        with self.busy():
            at = 0
            for rows in self.rows.values():
                rows.grad, at = gradient.view(-1)[at : at + rows.numel()].view_as(rows), at + rows.numel()
            self.optimizer.step()
            self.version += 1
            policy = {name: rows.detach() for name, rows in self.rows.items() if name.startswith("policy.")}
            parts = {name: self.layout.part(name, self.rank) for name in policy}
            return digest(policy, {name: part[0].start for name, part in parts.items() if part is not None})

    @aiodaft.method
    def shard(self) -> Weights:
        # Copies: an actor in the same process gets the very tensors of a result, and the optimizer changes its own.
        return {name: rows.detach().clone() for name, rows in self.rows.items()}

    @aiodaft.method
    def load(self, weights: Weights) -> None:
        for name, weight in weights.items():
            self.weights[name].copy_(weight)

    @aiodaft.method
    def ages_seen(self) -> Ages:
        return self.ages
