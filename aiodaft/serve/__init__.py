"""A server of language models: engines, a router in front of them, and OpenAI's API. `pip install aiodaft-serve`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiodaft.serve.batch import Sizes
from aiodaft.serve.engine import Bytes, Engine, Given, HttpEngine, Load, Piece, Refused, Request, Sampling, Tokenizer
from aiodaft.serve.routing import (
    Flight,
    Member,
    Policy,
    Router,
    Turns,
    least_work,
    prefix_locality,
    round_robin,
    sticky,
    two_choices,
)

if TYPE_CHECKING:
    from aiodaft.serve.openai import app
    from aiodaft.serve.torch_engine import Model, PretrainedTokenizer, TorchEngine, TransformersModel, pretrained

__all__ = [
    "Bytes", "Engine", "Flight", "Given", "HttpEngine", "Load", "Member", "Model", "Piece", "Policy",
    "PretrainedTokenizer", "Refused", "Request", "Router", "Sampling", "Sizes", "Tokenizer", "TorchEngine",
    "TransformersModel", "Turns", "app", "least_work", "prefix_locality", "pretrained", "round_robin", "sticky",
    "two_choices",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load what needs Starlette or torch at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{'openai' if name == 'app' else 'torch_engine'}"), name)
