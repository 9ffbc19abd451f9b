"""Small causal language models of any class of transformers, with random weights; for other examples."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# For experts, where a class has them: DeepSeek-V2 has no default for how many a token gets.
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | EXPERTS
# GPT-J and DeepSeek turn a part of the values of a head by its place, 64 by default, which a small head does not have.
TURNED = {"rotary_dim": 8, "qk_rope_head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16} | TURNED


def transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--model {name} needs transformers: pip install '.[transformers]'") from error


def causal_lm(name: str, **options: Any) -> nn.Module:
    """A model of a class of transformers, such as LlamaForCausalLM, made from its config."""
    cls = getattr(transformers(name), name)
    options |= SIZES | HEADS
    # An option that a config computes from the others, as Falcon's the size of a head, cannot be given.
    computed = {key for key in options if isinstance(getattr(cls.config_class, key, None), property)}
    return cls(cls.config_class(**{key: value for key, value in options.items() if key not in computed})).eval()


class WithKeysAndValues(nn.Module):
    """A causal language model as a function of tokens, and of the keys and values of those before them."""

    def __init__(self, name: str, vocabulary: int, context: int) -> None:
        super().__init__()
        why = f"--model {name}: the layers of this class keep no keys and values of every token"
        if getattr(transformers(name), name)._is_stateful:  # as Mamba: a sum of the text so far
            raise ValueError(why)
        tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        self.model = causal_lm(name, **tokens, max_position_embeddings=context)
        dynamic_cache = transformers(name).DynamicCache

        class Cache(dynamic_cache):
            """Tells of the keys and values that each layer adds."""

            on_layer: Callable[[Tensor], object] | None = None
            # DeepSeek's values are smaller than its keys.
            value_size = 0

            def update(self, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
                Cache.value_size = values.shape[3]
                if self.on_layer is not None:
                    missing = max(0, keys.shape[3] - values.shape[3])
                    self.on_layer(torch.stack([keys, nn.functional.pad(values, (0, missing))]))
                return super().update(keys, values, *args, **options)

        self.cache = Cache
        # Its name until transformers 5.20.
        known = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"
        layers: list[Tensor] = []
        self(torch.zeros(1, 1, dtype=torch.long), [], torch.zeros(1, dtype=torch.long), layers.append)
        if len(layers) != SIZES["num_hidden_layers"]:
            raise ValueError(why)
        self.shape = len(layers), layers[0].shape[2], layers[0].shape[4]

    def forward(self, tokens_BT: Tensor, past_LKBHPD: Any, lengths_B: Tensor, on_layer: Any) -> Tensor:
        cache, past = self.cache(), 0
        for layer, (keys_BHPD, values_BHPD) in enumerate(past_LKBHPD):
            if past := keys_BHPD.shape[2]:
                cache.update(keys_BHPD, values_BHPD[..., : cache.value_size], layer)
        cache.on_layer = on_layer
        new = torch.arange(tokens_BT.shape[1])
        seen_BS = torch.cat([torch.arange(past) < lengths_B[:, None], torch.ones_like(tokens_BT, dtype=torch.bool)], 1)
        output = self.model(
            input_ids=tokens_BT,
            attention_mask=seen_BS.long(),
            position_ids=lengths_B[:, None] + new,
            use_cache=True,
            **{self.cache_name: cache},
        )
        return output.logits[:, -1]
