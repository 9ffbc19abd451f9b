"""Small causal language models of any class of transformers, with random weights; for other examples."""

import importlib
from typing import Any

from torch import nn

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
