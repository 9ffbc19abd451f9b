"""Models with explicit keys and values, and steps over pages of memory: all ways to compute give the same tokens."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from hugging_face import causal_lm
from serve_batch import Batch, Sizes
from serve_model import CONTEXT, Model, Weights, greedy, make_model, no_past, text, train
from serve_paged import PagedModel
from serve_pages import Sequence
from torch import Tensor

COUNT = 12


@pytest.fixture(scope="module")
def weights() -> Weights:
    return train(40)


def prompts(number: int) -> list[bytes]:
    rng, source = random.Random(0), text()
    starts = [rng.randrange(len(source) - CONTEXT) for _ in range(number)]
    return [source[start : start + rng.randrange(1, 120)] for start in starts]


def no_export(sequence: Sequence, kv: Tensor) -> None:
    raise AssertionError("nothing is exported")


def complete(model: PagedModel, batch: Batch) -> None:
    while rows := batch.plan():
        for row, token in zip(rows, model.step(rows, no_export), strict=True):
            batch.advance(row, token)


ROOMY, TIGHT = Sizes(), Sizes(pages=15, places=4, chunk=7)


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_of_batches_are_those_of_one_prompt_without_cache(sizes: Sizes, weights: Weights) -> None:
    batch = check_batch(make_model("bytes", weights), sizes, 6)
    assert (batch.preempted > 0, batch.hit_tokens > 0) == ((sizes is TIGHT,) * 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "GPTJForCausalLM",
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.programs),
        pytest.param("FalconForCausalLM", marks=pytest.mark.programs),
        pytest.param("DeepseekV2ForCausalLM", marks=pytest.mark.programs),
        pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.programs),
    ],
)
def test_so_they_are_with_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    assert check_batch(make_model(name), TIGHT, 3).hit_tokens > 0


@pytest.mark.parametrize("name", ["MambaForCausalLM", "Mamba2ForCausalLM", "OpenAIGPTLMHeadModel"])
def test_a_class_without_keys_and_values_is_refused(name: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=f"--model {name}: the layers of this class keep no keys and values"):
        make_model(name)


def check_batch(model: Model, sizes: Sizes, count: int) -> Batch:
    some, batch = prompts(count), Batch(sizes)
    sequences = [Sequence(prompt, len(prompt) + COUNT) for prompt in [*some, *some[:2]]]
    for sequence in sequences:
        batch.add(sequence)
    complete(PagedModel(model, sizes.pages), batch)
    assert batch.pages.in_use == 0
    expected = [prompt + tokens for prompt, tokens in zip(some, greedy(model, some, COUNT), strict=True)]
    assert [sequence.tokens for sequence in sequences] == [*expected, *expected[:2]]
    return batch


@pytest.mark.parametrize("by_layer", [False, True])
def test_keys_and_values_that_another_model_has_computed_are_as_good(by_layer: bool, weights: Weights) -> None:
    here, there = (PagedModel(make_model("bytes", weights), pages=64) for _ in range(2))
    batch, prompt = Batch(Sizes(pages=64, chunk=16)), prompts(1)[0] * 3
    batch.add(first := Sequence(prompt, len(prompt) + 1, exports=True, by_layer=by_layer))
    exported: list[tuple[Sequence, Tensor]] = []
    before_last_layer: list[int] = []
    here.model.blocks[1].register_forward_pre_hook(lambda *_: before_last_layer.append(len(exported)))
    while rows := batch.plan():
        tokens = here.step(rows, lambda *each: exported.append(each))
        batch.advance(rows[0], tokens[0])
    assert [sequence for sequence, _ in exported] == [first] * (2 if by_layer else 1)
    # The first layer has left when the second one is computed.
    assert before_last_layer[-1] == by_layer
    parts = [kv for _, kv in exported]
    batch.add(second := Sequence(first.tokens, len(prompt) + COUNT, torch.stack(parts) if by_layer else parts[0]))
    complete(there, batch)
    assert second.tokens == prompt + greedy(here.model, [prompt], COUNT)[0]
    # None of the prompt was computed there.
    assert batch.prompt_tokens == len(prompt)


def test_the_model_learns_words(weights: Weights) -> None:
    source = torch.tensor([list(text()[:CONTEXT])])
    losses = [
        torch.nn.functional.cross_entropy(
            make_model("bytes", some).all_logits(source[:, :-1], *no_past(make_model("bytes"), 1), lambda _: None)[0],
            source[0, 1:],
        ).item()
        for some in (None, weights)
    ]
    assert losses[1] < 3 < losses[0]


def test_without_transformers_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"--model GPT2LMHeadModel needs transformers: pip install"):
        causal_lm("GPT2LMHeadModel")
