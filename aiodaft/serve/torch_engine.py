"""An engine that computes by torch: an actor that prefills and decodes, as it is asked to, in one batch."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Some
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from aiodaft import memory
from aiodaft.member import create_task
from aiodaft.methods import method
from aiodaft.runtime import current_runtime
from aiodaft.serve.batch import Batch, Row, Sequence, Sizes
from aiodaft.serve.engine import GREEDY, PAGE, Engine, Given, Load, Piece, Request, Sampling

OnLayer = Callable[[Tensor], object]


class Model(Protocol):
    """A causal language model, as a function of tokens, and of the keys and values of those before them.

    `shape` has the numbers of layers, of heads of keys and values, and of values of a head; `context` is the most
    tokens of a sequence.
    """

    shape: tuple[int, int, int]
    context: int

    def __call__(self, tokens_BT: Tensor, past_LKBHPD: Tensor, lengths_B: Tensor, on_layer: OnLayer) -> Tensor:
        """The logits (B, V) of the token after each row.

        Args:
            tokens_BT: The tokens.
            past_LKBHPD: Keys and values of tokens before them; of row b, only the first `lengths_B[b]` count.
            lengths_B: The number of tokens before them.
            on_layer: Is given the keys and values of the tokens (2, B, H, T, D) when a layer has them.
        """
        ...


class TransformersModel(nn.Module):
    """A causal language model of transformers as a `Model`; ValueError if it keeps no keys and values, as Mamba."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        from transformers import DynamicCache  # noqa: PLC0415 - optional package

        why = f"{type(model).__name__}: the layers of this class keep no keys and values of each token"
        if model._is_stateful:  # as Mamba: a sum of the text so far
            raise ValueError(why)
        self.model = model.eval()

        class Cache(DynamicCache):
            on_layer: OnLayer | None = None
            # DeepSeek's values are smaller than its keys.
            value_size = 0

            def update(  # type: ignore[override]  # the names of its arguments differ by version
                self, keys: Tensor, values: Tensor, *args: Any, **options: Any
            ) -> Any:
                Cache.value_size = values.shape[3]
                if self.on_layer is not None:
                    missing = max(0, keys.shape[3] - values.shape[3])
                    self.on_layer(torch.stack([keys, nn.functional.pad(values, (0, missing))]))
                return super().update(keys, values, *args, **options)

        self._cache = Cache
        # Its name until transformers 5.20.
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        layers: list[Tensor] = []
        device = model.device
        with torch.no_grad():
            no_tokens = torch.zeros(1, dtype=torch.long, device=device)
            self(no_tokens[:, None], [], no_tokens, layers.append)
        if len(layers) != model.config.num_hidden_layers:
            raise ValueError(why)
        self.shape = len(layers), layers[0].shape[2], layers[0].shape[4]
        self.context: int = model.config.max_position_embeddings

    def forward(self, tokens_BT: Tensor, past_LKBHPD: Any, lengths_B: Tensor, on_layer: OnLayer) -> Tensor:
        cache, past = self._cache(), 0
        for layer, (keys_BHPD, values_BHPD) in enumerate(past_LKBHPD):
            if past := keys_BHPD.shape[2]:
                cache.update(keys_BHPD, values_BHPD[..., : cache.value_size], layer)
        cache.on_layer = on_layer
        new = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        old = torch.arange(past, device=tokens_BT.device)
        seen_BS = torch.cat([old < lengths_B[:, None], torch.ones_like(tokens_BT, dtype=torch.bool)], 1)
        output = self.model(
            input_ids=tokens_BT,
            attention_mask=seen_BS.long(),
            position_ids=lengths_B[:, None] + new,
            use_cache=True,
            **{self._cache_name: cache},
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV


def pretrained(name: str, **options: Any) -> TransformersModel:
    """A model of transformers by its name or folder, with the options of `from_pretrained`, such as `device_map`."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional package

    return TransformersModel(AutoModelForCausalLM.from_pretrained(name, **options))


class PretrainedTokenizer:
    """A tokenizer of transformers (`AutoTokenizer.from_pretrained(name)`), with the chat template of its model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.size = tokenizer, len(tokenizer)
        self.stops = frozenset({tokenizer.eos_token_id} - {None})

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Some[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, messages: Some[Mapping[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _chance(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on both alone: draws need no state, which would have to move."""
    digest = blake2b(seed.to_bytes(16, "little", signed=True) + place.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _penalized(logits_V: Tensor, sampling: Sampling, tokens: list[int], written: list[int]) -> Tensor:
    logits_V = logits_V.double()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*tokens}), device=logits_V.device)
        old = logits_V[seen]
        logits_V[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if written and (sampling.presence_penalty or sampling.frequency_penalty):
        counts_V = torch.bincount(torch.tensor(written, device=logits_V.device), minlength=len(logits_V))
        logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * (counts_V > 0)
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    return logits_V


def _drawn(logits_V: Tensor, sampling: Sampling, place: int) -> int:
    probabilities_V = torch.softmax(logits_V.double() / sampling.temperature, 0)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        keep_V = torch.ones_like(sorted_V, dtype=torch.bool)
        if sampling.top_k:
            keep_V[sampling.top_k :] = False
        keep_V &= sorted_V >= sampling.min_p * sorted_V[0]
        if sampling.top_p < 1:
            sorted_V = sorted_V * keep_V / (sorted_V * keep_V).sum()
            keep_V &= sorted_V.cumsum(0) - sorted_V < sampling.top_p
        keep_V[0] = True
        probabilities_V[order_V[~keep_V]] = 0
    sums_V = probabilities_V.cumsum(0)
    chance = sums_V[-1:] * _chance(sampling.seed, place)
    return min(int(torch.searchsorted(sums_V, chance, right=True)), len(sums_V) - 1)


def sampled(logits_V: Tensor, request: Request, tokens: list[int]) -> Piece:
    """The token that follows `tokens`, the prompt and the text so far."""
    sampling = request.sampling
    written = tokens[len(request.tokens) - request.written :]
    changed_V = _penalized(logits_V, sampling, tokens, written) if _changes(sampling) else logits_V
    token = _drawn(changed_V, sampling, len(tokens)) if sampling.temperature > _COLD else int(changed_V.argmax())
    if sampling.logprobs is None:
        return Piece((token,))
    logprobs_V = torch.log_softmax(logits_V.float(), 0)
    most, which = logprobs_V.topk(min(sampling.logprobs, len(logprobs_V)))
    top = tuple(zip(which.tolist(), most.tolist(), strict=True))
    return Piece((token,), 1, float(logprobs_V[token]), top)


_COLD: Final = 1e-5  # a temperature below is that of the most likely token: its draws would overflow


def _changes(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.repetition_penalty != 1
    )


# Is given keys and values of a prompt: all of them (L, 2, H, T, D), or those of each layer.
Export = Callable[[Any, Tensor], object]


class PagedModel:
    """A model with a memory in pages for keys and values."""

    def __init__(self, model: Model, pages: int) -> None:
        self.layers, heads, size = model.shape
        weight = next(iter(model.parameters() if isinstance(model, nn.Module) else ()), torch.empty(0))
        self.device = weight.device
        self.memory_NLKHPD = torch.zeros(
            pages, self.layers, 2, heads, PAGE, size, dtype=weight.dtype, device=weight.device
        )
        self.model = model

    @torch.no_grad()
    def step(self, rows: list[Row], export: Export) -> list[Piece]:
        """The next piece of each row; any one for a row that is not the last of its prompt."""
        for row in rows:
            for start, kv_LKHTD in row.sequence.imported:
                self._write(torch.tensor([start], device=self.device), [row], kv_LKHTD.to(self.device)[:, :, None])
        # Rows of one token are computed together.
        singles, chunks = [row for row in rows if len(row.tokens) == 1], [row for row in rows if len(row.tokens) > 1]
        groups = ([singles] if singles else []) + [[row] for row in chunks]
        found: dict[Sequence, Piece] = {}
        for group in groups:
            found |= zip((row.sequence for row in group), self._forward(group, export), strict=True)
        return [found[row.sequence] for row in rows]

    def _forward(self, rows: list[Row], export: Export) -> list[Piece]:
        starts_B = torch.tensor([row.start for row in rows], device=self.device)
        past_LKBHPD = self.read(rows)
        exporting = {number: list[Tensor]() for number, row in enumerate(rows) if row.sequence.exports and row.is_last}
        new: list[Tensor] = []

        def on_layer(kv_KBHTD: Tensor) -> None:
            past_KBHPD = past_LKBHPD[len(new)]
            new.append(kv_KBHTD)
            for number, parts in exporting.items():
                row = rows[number]
                parts.append(torch.cat([past_KBHPD[:, number, :, : row.start], kv_KBHTD[:, number]], 2))
                if row.sequence.by_layer:
                    export(row.sequence, parts[-1])

        tokens_BT = torch.tensor([row.tokens for row in rows], device=self.device)
        logits_BV = self.model(tokens_BT, past_LKBHPD, starts_B, on_layer)
        self._write(starts_B, rows, torch.stack(new))
        for number, parts in exporting.items():
            if not rows[number].sequence.by_layer:
                export(rows[number].sequence, torch.stack(parts))
        likely = logits_BV.argmax(1).tolist()
        return [
            Piece((token,))
            if row.sequence.request.sampling == GREEDY or not row.is_last
            else sampled(logits_V, row.sequence.request, row.sequence.tokens)
            for row, token, logits_V in zip(rows, likely, logits_BV, strict=True)
        ]

    def read(self, rows: list[Row]) -> Tensor:
        """Keys and values before the tokens of each row (L, 2, B, H, P, D)."""
        table_BN = self._table(rows, -(-max(row.start for row in rows) // PAGE))
        return self.memory_NLKHPD[table_BN].permute(2, 3, 0, 4, 1, 5, 6).flatten(4, 5)

    def _write(self, starts_B: Tensor, rows: list[Row], kv_LKBHTD: Tensor) -> None:
        places_BT = starts_B[:, None] + torch.arange(kv_LKBHTD.shape[4], device=self.device)
        table_BN = self._table(rows, max(len(row.pages) for row in rows))
        pages = table_BN.gather(1, places_BT // PAGE).flatten()
        values = kv_LKBHTD.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
        self.memory_NLKHPD[pages, :, :, :, places_BT.flatten() % PAGE] = values

    def _table(self, rows: list[Row], most: int) -> Tensor:
        """The first pages of each row (B, N). Behind its last one, any page will do."""
        pages = [(*row.pages, *[0] * most)[:most] for row in rows]
        return torch.tensor(pages, dtype=torch.long, device=self.device).view(len(rows), most)


_SIZES: Final = Sizes()


class Counts(NamedTuple):
    """The state of an engine, and its work since it began."""

    pid: int
    sequences: int
    pages_in_use: int
    steps: int
    preempted: int
    prompt_tokens: int
    hit_tokens: int
    kv_messages: int
    kv_bytes: int


@dataclass(eq=False)
class _Awaited(Sequence):
    """`results` are keys and values if it exports them, then pieces, then None."""

    results: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class TorchEngine(Engine):
    """An engine in torch: continuous batches, prompts in chunks, pages that prompts with the same beginning share.

    `model(*args)` makes the model in the actor, again at each restart.
    """

    def __init__(self, model: Callable[..., Model], *args: Any, sizes: Sizes = _SIZES) -> None:
        made = model(*args)
        self.model, self.batch, self.steps = PagedModel(made, sizes.pages), Batch(sizes), 0
        self.context = min(made.context, sizes.pages * PAGE)
        self.changed = asyncio.Event()
        self.layers: dict[str, dict[int, asyncio.Future[Tensor]]] = {}  # that nobody has asked for yet
        self.decoding: dict[str, _Awaited] = {}
        self.coming: dict[str, asyncio.Future[Given]] = {}

    async def __aenter__(self) -> TorchEngine:
        self.loop = asyncio.get_running_loop()
        self.stepping = create_task(self._run())  # if a step fails, the process ends: the sequences go on elsewhere
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stepping.cancel()
        await asyncio.wait([self.stepping])

    @method
    async def prefill(self, request: Request, by_layer: bool = False) -> Given:
        sequence = self._begin(request, [*request.tokens], len(request.tokens) + 1, exports=True, by_layer=by_layer)
        layers = [self.loop.create_future() for _ in range(self.model.layers if by_layer else 0)]
        kv = None
        try:
            if by_layer:
                self.layers[request.name] = dict(enumerate(layers))
                for layer in layers:
                    layer.set_result(await sequence.results.get())
                while self.layers[request.name]:
                    await self.changed.wait()
            else:
                kv = await sequence.results.get()
            piece: Piece = await sequence.results.get()
            return Given((*request.tokens, *piece.ids), kv, 0, (piece,))
        finally:
            self._leave(sequence)
            self.layers.pop(request.name, None)
            for layer in layers:
                layer.cancel()

    @method
    async def layer(self, name: str, number: int) -> Tensor:
        layer = self.layers[name].pop(number)
        self._ring()
        return await layer

    @method(ordered=False)  # does not hold up others until its keys and values are there
    async def decode(
        self, request: Request, given: Given | None = None, layers: list[Tensor] | None = None
    ) -> AsyncGenerator[Piece]:
        end, parts, given = len(request.tokens) + request.count, list[tuple[int, Tensor]](), given or Given((), None)
        tokens = given.tokens or request.tokens
        if layers:
            parts.append((0, torch.stack(layers)))
        try:
            while True:
                if given.kv is not None and given.kv.shape[3]:
                    parts.append((given.start, given.kv))
                for piece in given.pieces:
                    yield piece
                    if len(tokens) >= end or piece.ids[-1] in request.stops:
                        return
                if not given.more:
                    break
                self.coming[request.name] = self.loop.create_future()
                yield Piece((), _end_of(parts))
                given = await self.coming[request.name]
                tokens = given.tokens
        finally:
            self.coming.pop(request.name, None)
        sequence = self._begin(request, [*tokens], end, imported=parts, ready=_end_of(parts))
        self.decoding[request.name] = sequence
        try:
            while (written := await sequence.results.get()) is not None:
                yield written
        finally:
            self.decoding.pop(request.name, None)
            self._leave(sequence)

    @method
    async def give(self, name: str, start: int = 0, last: bool = False) -> Given:
        sequence, preempted = self.decoding[name], self.batch.preempted
        if sequence.complete:
            raise LookupError(f"{name} is complete")
        if last:
            self.batch.hold(sequence)
            del self.decoding[name]
        row = Row(sequence, sequence.cached, [], tuple(sequence.pages), False)
        try:
            kv = await asyncio.to_thread(self._copied, row, start)
            if not last and (sequence.complete or name not in self.decoding or preempted != self.batch.preempted):
                raise LookupError(f"{name} lost its keys and values while they were copied")
            return Given((*sequence.tokens,), kv, start, more=not last)
        finally:
            if last:
                self.batch.give_back(sequence)
                sequence.results.put_nowait(Piece(()))
                sequence.results.put_nowait(None)
                self._ring()

    def _copied(self, row: Row, start: int) -> Tensor:
        kv_LKHTD = self.model.read([row])[:, :, 0, :, start : row.start]
        return _shared(kv_LKHTD)

    @method
    async def take(self, name: str, given: Given) -> None:
        self.coming.pop(name).set_result(given)

    @method
    async def loads(self) -> AsyncGenerator[Load]:
        while True:
            load, process = self.batch.load(), (platform.node(), os.getpid())
            yield load._replace(process=process, layers=self.model.layers, context=self.context)
            while not self.batch.has_news:
                await self.changed.wait()

    @method
    async def counts(self) -> Counts:
        """Its state and work."""
        batch, traffic = self.batch, current_runtime().traffic()
        now = len(batch.waiting) + len(batch.running), batch.pages.in_use
        done = self.steps, batch.preempted, batch.prompt_tokens, batch.hit_tokens
        return Counts(os.getpid(), *now, *done, traffic.payloads_sent, traffic.payload_sent)

    def _begin(self, request: Request, tokens: list[int], end: int, **options: Any) -> _Awaited:
        sequence = _Awaited(tokens, end, request, **options)
        self.batch.add(sequence)
        self._ring()
        return sequence

    def _leave(self, sequence: _Awaited) -> None:
        self.batch.drop(sequence)
        self._ring()

    def _ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _run(self) -> None:
        while True:
            while not (rows := self.batch.plan()):
                await self.changed.wait()
            pieces = await asyncio.to_thread(self.model.step, rows, self._export)
            self.steps += 1
            for row, piece in zip(rows, pieces, strict=True):
                sequence = row.sequence
                if sequence in self.batch.running and self.batch.advance(row, piece.ids[-1]):
                    assert isinstance(sequence, _Awaited)
                    sequence.results.put_nowait(piece)
                    if sequence.complete:
                        sequence.results.put_nowait(None)
            self._ring()

    def _export(self, sequence: _Awaited, kv: Tensor) -> None:
        self.loop.call_soon_threadsafe(sequence.results.put_nowait, _shared(kv))


def _shared(kv: Tensor) -> Tensor:
    return memory.empty(kv.shape, dtype=kv.dtype).copy_(kv)


def _end_of(parts: list[tuple[int, Tensor]]) -> int:
    return parts[-1][0] + parts[-1][1].shape[3] if parts else 0
