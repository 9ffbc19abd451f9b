"""Models with explicit keys and values, and steps over pages of memory: all ways to compute give the same tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import causal_lm
from serve_model import CONTEXT, Weights, greedy, make_model, no_past, text, train
from torch import Tensor

from aiodaft.serve import Model, Piece, Request, Sampling, Sizes
from aiodaft.serve.batch import Batch, Sequence
from aiodaft.serve.engine import GREEDY
from aiodaft.serve.torch_engine import PagedModel, PretrainedTokenizer, pretrained, sampled

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


def sequence_of(prompt: bytes, count: int, sampling: Sampling = GREEDY, **options: Any) -> Sequence:
    return Sequence([*prompt], len(prompt) + count, Request((*prompt,), count, sampling), **options)


def complete(model: PagedModel, batch: Batch) -> None:
    while rows := batch.plan():
        for row, piece in zip(rows, model.step(rows, no_export), strict=True):
            batch.advance(row, piece.ids[0])


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


@pytest.mark.parametrize("name", ["MambaForCausalLM", "OpenAIGPTLMHeadModel"])
def test_a_class_without_keys_and_values_is_refused(name: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=f"{name}: the layers of this class keep no keys and values"):
        make_model(name)


def check_batch(model: Model, sizes: Sizes, count: int) -> Batch:
    some, batch = prompts(count), Batch(sizes)
    sequences = [sequence_of(prompt, COUNT) for prompt in [*some, *some[:2]]]
    for sequence in sequences:
        batch.add(sequence)
    complete(PagedModel(model, sizes.pages), batch)
    assert batch.pages.in_use == 0
    expected = [prompt + tokens for prompt, tokens in zip(some, greedy(model, some, COUNT), strict=True)]
    assert [bytes(sequence.tokens) for sequence in sequences] == [*expected, *expected[:2]]
    return batch


@pytest.mark.parametrize("by_layer", [False, True])
def test_keys_and_values_that_another_model_has_computed_are_as_good(by_layer: bool, weights: Weights) -> None:
    here, there = (PagedModel(make_model("bytes", weights), pages=64) for _ in range(2))
    batch, prompt = Batch(Sizes(pages=64, chunk=16)), prompts(1)[0] * 3
    batch.add(first := sequence_of(prompt, 1, exports=True, by_layer=by_layer))
    exported: list[tuple[Sequence, Tensor]] = []
    before_last_layer: list[int] = []
    here.model.blocks[1].register_forward_pre_hook(lambda *_: before_last_layer.append(len(exported)))
    while rows := batch.plan():
        pieces = here.step(rows, lambda *each: exported.append(each))
        batch.advance(rows[0], pieces[0].ids[0])
    assert [sequence for sequence, _ in exported] == [first] * (2 if by_layer else 1)
    # The first layer has left when the second one is computed.
    assert before_last_layer[-1] == by_layer
    parts = [kv for _, kv in exported]
    kv = torch.stack(parts) if by_layer else parts[0]
    second = sequence_of(bytes(first.tokens), COUNT - 1)
    # In two parts, as when a request moves.
    second.imported, second.ready = [(0, kv[:, :, :, :50]), (50, kv[:, :, :, 50:])], len(prompt)
    batch.add(second)
    complete(there, batch)
    assert bytes(second.tokens) == prompt + greedy(here.model, [prompt], COUNT)[0]
    # None of the prompt was computed there.
    assert batch.prompt_tokens == len(prompt)


SAMPLINGS = [
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5, seed=3),
    Sampling(temperature=1.3, top_p=0.8, min_p=0.01, seed=4),
    Sampling(presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(temperature=0.9, repetition_penalty=1.3, seed=5, logprobs=3),
]


def written(model: PagedModel, sizes: Sizes, prompt: bytes, samplings: list[Sampling]) -> list[bytes]:
    batch, sequences = Batch(sizes), [sequence_of(prompt, COUNT, sampling) for sampling in samplings]
    for sequence in sequences:
        batch.add(sequence)
    complete(model, batch)
    return [bytes(sequence.tokens[len(prompt) :]) for sequence in sequences]


def test_what_is_drawn_depends_on_the_seed_and_the_text_and_not_on_the_batch_or_on_moves(weights: Weights) -> None:
    model, prompt = PagedModel(make_model("bytes", weights), TIGHT.pages), prompts(1)[0]
    together = written(model, TIGHT, prompt, SAMPLINGS)
    assert together == [written(model, ROOMY._replace(pages=15), prompt, [one])[0] for one in SAMPLINGS]
    assert len({*together}) == len(SAMPLINGS)
    # As when another engine goes on: some of the text is in its prompt.
    for sampling, text_so_far in zip(SAMPLINGS, together, strict=True):
        rest = Request((*prompt,), COUNT, sampling).after(text_so_far[:5], 5)
        sequence, batch = Sequence([*rest.tokens], len(prompt) + COUNT, rest), Batch(TIGHT)
        batch.add(sequence)
        complete(model, batch)
        assert bytes(sequence.tokens[len(prompt) :]) == text_so_far


def drawn(logits: list[float], count: int = 400, **options: Any) -> list[int]:
    requests = [Request((0,), 1, Sampling(**{"temperature": 1.0, "seed": seed, **options})) for seed in range(count)]
    return [sampled(torch.tensor(logits), request, [0]).ids[0] for request in requests]


def test_draws_have_the_probabilities_of_the_model_within_the_limits() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()
    counts = [drawn(logits).count(token) for token in range(4)]
    # Four standard deviations.
    assert all(abs(found - 400 * chance) < 40 for found, chance in zip(counts, (0.5, 0.25, 0.15, 0.1), strict=True))
    assert {*drawn(logits, top_k=2)} == {0, 1}
    assert {*drawn(logits, top_p=0.7)} == {0, 1}
    assert {*drawn(logits, top_p=0.76)} == {0, 1, 2}
    assert {*drawn(logits, min_p=0.25)} == {0, 1, 2}
    assert {*drawn(logits, top_k=3, top_p=0.5)} == {0}
    assert {*drawn(logits, logit_bias=((3, 100.0),))} == {3}
    for most_likely in ({"temperature": 0}, {"temperature": 1e-320}, {"top_p": 0.0}):
        assert drawn(logits, **most_likely) == [0] * 400
    cold = drawn(logits, temperature=0.5)
    assert abs(cold.count(0) - 400 * 0.25 / 0.345) < 40


def test_penalties_count_the_text_and_logprobs_are_those_of_the_model() -> None:
    logits, tokens = torch.tensor([2.0, 1.9, 1.0, -1.0]), [0, 1, 1]

    def likely(written: int, **options: Any) -> Piece:
        return sampled(logits, Request((*tokens,), 1, Sampling(**options), written=written), tokens)

    assert likely(3).ids == (0,)
    assert likely(3, frequency_penalty=0.2).ids == (0,)
    assert likely(3, frequency_penalty=0.95).ids == (0,)
    assert likely(3, frequency_penalty=1.1).ids == (2,)
    assert likely(2, presence_penalty=1.5).ids == (0,)
    assert likely(3, presence_penalty=1.5).ids == (2,)
    assert likely(0, presence_penalty=1.5).ids == (0,)
    assert likely(0, repetition_penalty=3.0).ids == (2,)
    piece = likely(0, presence_penalty=1.5, logprobs=2)
    logprobs = torch.log_softmax(logits, 0)
    assert torch.tensor(piece.logprob).isclose(logprobs[0])
    assert [token for token, _ in piece.top] == [0, 1]
    assert torch.tensor([logprob for _, logprob in piece.top]).allclose(logprobs[:2])


def test_a_model_and_a_tokenizer_of_transformers_are_loaded_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its bars would leave a thread.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "</s>": 1, "user": 2, "hello": 3, "world": 4}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="[UNK]")
    fast.chat_template = "{% for one in messages %}{{ one.role }} {{ one.content }} {% endfor %}"
    fast.save_pretrained(tmp_path)
    tokenizer = PretrainedTokenizer(transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert (tokenizer.size, tokenizer.stops) == (5, {1})
    assert tokenizer.encode("hello world") == [3, 4]
    assert tokenizer.decode([3, 4, 1]) == "hello world"
    assert tokenizer.chat([{"role": "user", "content": "hello"}]) == [2, 3]

    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    llama = causal_lm("LlamaForCausalLM", **no_tokens, vocab_size=5, max_position_embeddings=64)
    llama.save_pretrained(tmp_path)  # type: ignore[operator]
    model = pretrained(str(tmp_path))
    assert (model.shape, model.context) == ((2, 4, 16), 64)
    tokens = torch.tensor([[2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(model(tokens, *no_past(model, 1), lambda _: None), llama(tokens).logits[:, -1])


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
