"""Models of `serve_disagg.py`: a small GPT, or a class of transformers. Tokens are bytes."""

from collections.abc import Iterable, Iterator, Sequence
from pydoc_data.topics import topics

import torch
from byte_gpt import batches
from hugging_face import causal_lm
from torch import Tensor, nn

from aiodaft.serve import Model, TransformersModel
from aiodaft.serve.torch_engine import OnLayer

CONTEXT, TEXT = 256, 10_000
WIDTH, LAYERS, HEADS = 64, 2, 8

Weights = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTC: Tensor, past_KBHPD: Tensor, bias_BHTS: Tensor, on_layer: OnLayer) -> Tensor:
        qkv = self.qkv(self.before_attention(x_BTC)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        on_layer(qkv[1:])
        keys_BHSD, values_BHSD = torch.cat([past_KBHPD, qkv[1:]], 3)
        x_BHTD = nn.functional.scaled_dot_product_attention(qkv[0], keys_BHSD, values_BHSD, bias_BHTS)
        x_BTC = x_BTC + self.out(x_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.before_mlp(x_BTC))


class ByteGPT(nn.Module):
    """A GPT that learns in seconds: at first, head h of layer 0 looks h bytes back, and those of others look nearby."""

    shape, context = (LAYERS, HEADS, WIDTH // HEADS), CONTEXT

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens_BT: Tensor, past_LKBHPD: Tensor, lengths_B: Tensor, on_layer: OnLayer) -> Tensor:
        return self.all_logits(tokens_BT, past_LKBHPD, lengths_B, on_layer)[:, -1]

    def all_logits(self, tokens_BT: Tensor, past_LKBHPD: Tensor, lengths_B: Tensor, on_layer: OnLayer) -> Tensor:
        return self.layers(self.bytes(tokens_BT), past_LKBHPD, lengths_B, on_layer)

    def layers(self, x_BTC: Tensor, past_LKBHPD: Tensor, lengths_B: Tensor, on_layer: OnLayer) -> Tensor:
        """The logits (B, T, V) of the token after each of some embeddings."""
        old_P = torch.arange(past_LKBHPD.shape[4])
        if not len(old_P):
            lengths_B = lengths_B[:1]  # all begin at 0, and look back in the same way
        places_BT = lengths_B[:, None] + torch.arange(x_BTC.shape[1])
        # Tokens that do not count are masked like later ones.
        old_BP = torch.where(old_P < lengths_B[:, None], old_P, CONTEXT)
        back_B1TS = (places_BT[:, :, None] - torch.cat([old_BP, places_BT], 1)[:, None, :])[:, None]
        heads_H11 = torch.arange(HEADS)[:, None, None]
        first_BHTS = -8.0 * (back_B1TS - heads_H11).abs()
        other_BHTS = -back_B1TS * 0.25 ** (heads_H11 + 1)
        for number, block in enumerate(self.blocks):
            bias_BHTS = (other_BHTS if number else first_BHTS).masked_fill(back_B1TS < 0, -torch.inf)
            x_BTC = block(x_BTC, past_LKBHPD[number], bias_BHTS, on_layer)
        return self.head(x_BTC)


def make_model(name: str, weights: Weights | None = None) -> ByteGPT | TransformersModel:
    torch.set_num_threads(1)  # one thread adds in the same order everywhere
    torch.manual_seed(0)
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if name == "bytes":
        model = ByteGPT()
    else:
        model = TransformersModel(causal_lm(name, **no_tokens, vocab_size=256, max_position_embeddings=CONTEXT))
    if weights is not None:
        model.load_state_dict(weights)
    return model.eval()


def no_past(model: Model, rows: int) -> tuple[Tensor, Tensor]:
    layers, heads, size = model.shape
    return torch.empty(layers, 2, rows, heads, 0, size), torch.zeros(rows, dtype=torch.long)


def text() -> bytes:
    """Some of Python's documentation."""
    return "\n".join(topics[topic] for topic in sorted(topics)).encode("ascii", "ignore")[:TEXT]


def learn(model: nn.Module, losses: Iterable[Tensor], steps: int) -> Weights:
    """The weights after a step for each loss; each loss is computed with the weights that there are by then."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps, pct_start=0.1)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def train(steps: int) -> Weights:
    """The weights of a ByteGPT that has learned from the text."""
    model, rows = make_model("bytes"), 8

    def losses() -> Iterator[Tensor]:
        for tokens_BT, next_BT in batches(rows, steps, data=torch.tensor(list(text()))):
            logits_BTV = model.all_logits(tokens_BT, *no_past(model, rows), lambda _: None)
            yield nn.functional.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten())

    return learn(model, losses(), steps)


@torch.inference_mode()
def greedy(model: Model, prompts: Sequence[bytes], count: int) -> list[bytes]:
    """The most likely continuations, without caches: every other way to compute them has to give the same."""
    found: dict[bytes, bytes] = {}
    for length in {len(prompt) for prompt in prompts}:
        rows = [prompt for prompt in prompts if len(prompt) == length]
        tokens_BT = torch.tensor([list(prompt) for prompt in rows])
        for _ in range(count):
            logits_BV = model(tokens_BT, *no_past(model, len(rows)), lambda _: None)
            tokens_BT = torch.cat([tokens_BT, logits_BV.argmax(1, keepdim=True)], 1)
        found |= {prompt: bytes(tokens[length:]) for prompt, tokens in zip(rows, tokens_BT.tolist(), strict=True)}
    return [found[prompt] for prompt in prompts]
