"""Policies, samples and the task of `rl_grpo.py`.

The task: a prompt has two digits a and b below 8. The answer has two tokens; it earns 0.5 if the first is
(a + b) mod 8, and 0.5 more if the second then ends the answer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hugging_face import causal_lm
from torch import Tensor, nn

from aiodaft.resharding import Layout, Sharding

VOCABULARY, END, PADDING, PROMPT, ANSWER = 10, 8, 9, 2, 2
PROMPTS, GROUP = 8, 8  # a chunk has 8 prompts with 8 answers each
SAMPLES = PROMPTS * GROUP

Weights = dict[str, Tensor]


class WindowModel(nn.Module):
    """A causal language model that sees the last three tokens."""

    def __init__(self, outputs: int = VOCABULARY, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * VOCABULARY, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        windows_BLW = nn.functional.pad(tokens_BL, (2, 0), value=PADDING).unfold(1, 3, 1)
        return self.layers(nn.functional.one_hot(windows_BLW, VOCABULARY).flatten(2).float())


class HuggingFaceModel(nn.Module):
    """A small causal language model of a class of transformers, with random weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": END, "pad_token_id": PADDING}
        self.model = causal_lm(name, **tokens, max_position_embeddings=16, use_cache=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BL, attention_mask=torch.ones_like(tokens_BL)).logits


def make_policy(model: str, seed: int) -> nn.Module:
    torch.set_num_threads(1)  # one thread adds in the same order everywhere
    torch.manual_seed(seed)
    return WindowModel() if model == "window" else HuggingFaceModel(model)


def weights_of(policy: nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def digest(weights: Weights, first_rows: Mapping[str, int] | None = None) -> int:
    """Of rows of weights, from these on: digests of parts add up to that of the whole, of which each bit counts."""
    total = 0
    for name, weight in weights.items():
        for row, values in enumerate(weight, (first_rows or {}).get(name, 0)):
            total += int.from_bytes(hashlib.sha256(f"{name} {row}".encode() + values.numpy().tobytes()).digest())
    return total % (1 << 256)


def rows_of(weights: Weights, ranks: int) -> Layout:
    return Layout(
        {"tp": ranks},
        {name: Sharding(shape=one.shape, dtype=one.dtype, dims={0: "tp"}) for name, one in weights.items()},
    )


def whole_of(weights: Weights, ranks: int, names: str = "") -> Layout:
    """All weights whose names begin like this, at each rank."""
    chosen = {name: one for name, one in weights.items() if name.startswith(names)}
    return Layout({"replica": ranks}, {n: Sharding(shape=one.shape, dtype=one.dtype) for n, one in chosen.items()})


def log_probabilities(policy: nn.Module, tokens_BL: Tensor) -> Tensor:
    """Of all tokens, at each place of the answer."""
    return policy(tokens_BL)[:, PROMPT - 1 : -1].log_softmax(-1)


def of_tokens(logps_BAV: Tensor, tokens_BL: Tensor) -> Tensor:
    return logps_BAV.gather(2, tokens_BL[:, PROMPT:, None]).squeeze(2)


@dataclass
class Rollouts:
    """The samples of a chunk: GROUP answers to the first prompt, then to the second, ..."""

    chunk: int
    tokens: Tensor  # (SAMPLES, PROMPT + ANSWER): prompt and answer
    logps: Tensor  # (SAMPLES, ANSWER): log-probability of each token of the answer, by the policy that chose it
    versions: Tensor  # (SAMPLES, ANSWER): the version of the weights of that policy


def reward(a: int, b: int, first: int, second: int) -> float:
    right = first == (a + b) % 8
    return 0.5 * right + 0.5 * (right and second == END)
