"""Two language models on one GPU that write together, each in a process of its own, next to both in one process.

    python examples/one_gpu.py

They write by contrastive decoding: the next token is one that the large model finds likely and the small one does not.
So logits go from the small model to the large one, and each chosen token goes back, all in the memory of the GPU; this
process waits only for the texts. While the large model has one batch, the small one has another. `write` has the whole
computation: given two actors it calls them, given two objects it computes here. Without a GPU, models are small.
"""

import argparse
import asyncio
import math
import time

import torch
from torch import Tensor, nn

import aiodaft

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LARGE, SMALL = ((4096, 12), (2048, 6)) if ON_GPU else ((128, 3), (64, 2))  # width, layers
ROWS, HEAD, VOCABULARY = (32, 128, 32768) if ON_GPU else (16, 16, 2048)
PROMPT, WARM_UP = 16, 8  # tokens


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: Tensor, cache_KBHLD: Tensor, start: int) -> Tensor:
        qkv = self.qkv(self.before_attention(x_BTC)).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        end = start + x_BTC.shape[1]
        cache_KBHLD[:, :, :, start:end] = qkv[1:]
        keys_BHSD, values_BHSD = cache_KBHLD[:, :, :, :end]
        y_BHTD = nn.functional.scaled_dot_product_attention(qkv[0], keys_BHSD, values_BHSD, is_causal=start == 0)
        x_BTC = x_BTC + self.out(y_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.before_mlp(x_BTC))


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens_BT: Tensor, cache_NKBHLD: Tensor, start: int) -> Tensor:
        x_BTC = self.tokens(tokens_BT) + self.places.weight[start : start + tokens_BT.shape[1]]
        for layer, cache_KBHLD in zip(self.layers, cache_NKBHLD, strict=True):
            x_BTC = layer(x_BTC, cache_KBHLD, start)
        return self.head(self.norm(x_BTC[:, -1]))


class Writer(aiodaft.Actor, gpus=0.5):
    """A model, the texts of all batches, and their keys and values. Two of them share a GPU: each needs half of one."""

    def __init__(self, width: int, layers: int, batches: int, tokens: int) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        torch.set_default_dtype(DTYPE)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would make a plan for each new length, which takes long
        torch.manual_seed(0)
        # The prompts, and the tokens that will be replaced.
        self.texts = torch.randint(VOCABULARY, (batches, ROWS, PROMPT + tokens)).to(DEVICE)
        with DEVICE:
            self.decoder = Decoder(width, layers, PROMPT + tokens).requires_grad_(False)
            self.caches = torch.zeros(batches, layers, 2, ROWS, width // HEAD, PROMPT + tokens, HEAD)

    def read(self, batch: int, place: int) -> Tensor:
        start = 0 if place == PROMPT else place - 1
        return self.decoder(self.texts[batch, :, start:place], self.caches[batch], start)

    @aiodaft.method
    def logits(self, batch: int, place: int, last_B: Tensor | None) -> Tensor:
        """Of the tokens at a place, given those just before it, which the other model has chosen."""
        if last_B is not None:
            self.texts[batch, :, place - 1] = last_B
        return self.read(batch, place)

    @aiodaft.method
    def choose(self, batch: int, place: int, unlikely_BV: Tensor) -> Tensor:
        """The tokens at a place, given the logits of the other model."""
        likely_BV = self.read(batch, place).float().log_softmax(1)
        contrast_BV = likely_BV - unlikely_BV.float().log_softmax(1)
        implausible_BV = likely_BV < likely_BV.amax(1, keepdim=True) + math.log(0.1)
        tokens_B = contrast_BV.masked_fill(implausible_BV, -torch.inf).argmax(1)
        self.texts[batch, :, place] = tokens_B
        return tokens_B

    @aiodaft.method
    def text(self, batch: int) -> Tensor:
        return self.texts[batch]

    @aiodaft.method
    async def seen(self) -> tuple[str, aiodaft.state.Traffic]:
        """The device, and the traffic of this process."""
        gpu = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
        return f"{gpu.name}, {gpu.uuid}" if gpu else "CPU", aiodaft.current_runtime().traffic()


def write(large: Writer, small: Writer, batches: int, tokens: int) -> list[aiodaft.Ref[Tensor]]:
    last: list[aiodaft.Ref[Tensor] | None] = [None] * batches
    for place in range(PROMPT, PROMPT + tokens):
        for batch in range(batches):
            unlikely = small.logits(batch, place, last[batch])
            last[batch] = large.choose(batch, place, unlikely)
    return [large.text(batch) for batch in range(batches)]


async def timed(large: Writer, small: Writer, batches: int, tokens: int) -> tuple[Tensor, float]:
    """The texts, and tokens per second: all that are chosen, from the first call until the texts are here."""
    for count in (min(WARM_UP, tokens), tokens):
        began = time.perf_counter()
        texts = write(large, small, batches, count)
        texts_NBL = torch.stack([await text if isinstance(text, aiodaft.Ref) else text for text in texts]).cpu()
    return texts_NBL, batches * ROWS * tokens / (time.perf_counter() - began)


async def main(batches: int, tokens: int) -> None:
    large_sizes, small_sizes = (*LARGE, batches, tokens), (*SMALL, batches, tokens)
    expected, speed = await timed(Writer(*large_sizes), Writer(*small_sizes), batches, tokens)
    print(f"one process:    {speed:,.0f} tokens/s")
    torch.cuda.empty_cache()
    async with (
        aiodaft.Runtime(gpus=1) as rt,  # also on a machine without one
        rt.spawn(Writer, *large_sizes) as large,
        rt.spawn(Writer, *small_sizes) as small,
    ):
        texts_NBL, speed = await timed(large, small, batches, tokens)
        (device, traffic), (same_device, _) = await asyncio.gather(large.seen(), small.seen())
    print(f"two processes:  {speed:,.0f} tokens/s")
    print(f"measured:       {batches} batches of {ROWS} texts get {tokens} tokens each; without start and warm-up")
    assert device == same_device
    print(f"both models on: {device}")
    print(f"logits moved:   {traffic.payload_received} bytes, {traffic.device_received} of them within the GPU")
    assert torch.equal(texts_NBL, expected)
    print(f"the texts are equal, bit for bit; {len(texts_NBL[..., PROMPT:].unique())} different tokens were chosen")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256 if ON_GPU else 32, help="to add to each text")
    options = parser.parse_args()
    aiodaft.run(main(options.batches, options.tokens))
