"""Modules whose parameters are distributed tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.utils._pytree import tree_map

from aiodaft.tensor.handles import DistTensor
from aiodaft.tensor.specs import Placement
from aiodaft.tensor.strategy import Strategy, check_patterns, first

__all__ = ["distribute"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def distribute(put: Callable[..., DistTensor], module: ModuleT, strategy: Strategy) -> ModuleT:
    """Replaces the parameters and buffers of a module, in place. For `put` see `Workers.put`."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, one in (parameters | buffers).items():
        if one.is_meta or isinstance(one, DistTensor):
            why = "on the device meta, without data: load its values" if one.is_meta else "a distributed tensor already"
            raise ValueError(f"{name} is {why}")
    check_patterns("params", strategy.params, parameters)
    check_patterns("outputs", strategy.outputs, modules)
    made: dict[int, Tensor] = {}
    for name, one in (parameters | buffers).items():
        if id(one) not in made:
            placements = (first(strategy.params, name) or {}) if name in parameters and one.dim() else {}
            tensor: Tensor = put(one.detach(), **placements)
            if name in parameters:
                tensor = nn.Parameter(tensor, requires_grad=one.requires_grad)
            if tensor.requires_grad:
                tensor.register_hook(partial(_placed, placements=placements))  # type: ignore[no-untyped-call]  # torch's
            made[id(one)] = tensor
        path, _, own = name.rpartition(".")
        setattr(modules[path], own, made[id(one)])
    for name, one in modules.items():
        one.register_forward_hook(partial(_output, wanted=first(strategy.outputs, name)))
    return module


def _placed(value: Any, placements: Mapping[str, Placement]) -> Any:
    return value.redistribute(**placements) if isinstance(value, DistTensor) else value


def _output(module: object, args: object, output: Any, wanted: Mapping[str, Placement] | None) -> Any:
    """As in plans: where a module ends, sums over ranks are complete, and a gradient is placed as its value."""

    def place(one: Any) -> Any:
        if not isinstance(one, DistTensor):
            return one
        now = one.placements
        target = {axis: Replicate() if at.is_partial() else at for axis, at in now.items()}
        if wanted is not None:
            target = dict.fromkeys(now, Replicate()) | dict(wanted)
        if target != now:
            one = one.redistribute(**target)
        if one.grad_fn is not None:
            one.register_hook(partial(_placed, placements=target))
        return one

    return tree_map(place, output)
