"""Optimizers of torch while a step is captured: their states and numbers are inputs of the program."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aiodaft.tensor.scalars import EXTREMES
from aiodaft.tensor.tracer import CaptureError, Tracer

aten = torch.ops.aten

_PLAIN = {"foreach": False, "fused": False, "capturable": False}
"""The form of an optimizer that updates one tensor after the other, without fused kernels."""


_FLOATS = {"lr", "momentum", "dampening", "weight_decay", "eps", "alpha", "lr_decay"}
"""Numbers of groups that may be given as integers."""

_COUNTS = {"step", "eta", "mu", "mu_product"}
"""States of torch's optimizers that are numbers, also of parameters that have more elements."""


class Update:
    """An optimizer whose parameters are fake tensors for a while."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        tracer: Tracer,
        owned: Mapping[int, tuple[str, torch.Tensor]],
    ) -> None:
        self.name, self.optimizer, self.tracer, self.owned = name, optimizer, tracer, owned

    @contextmanager
    def entered(self, begin: Callable[[], None]) -> Generator[None]:
        optimizer, tracer = self.optimizer, self.tracer
        attributes = dict(vars(optimizer))
        code = inspect.unwrap(type(optimizer).step).__globals__
        added = {name: one for name, one in EXTREMES.items() if name not in code}

        def enter(*_: Any) -> None:
            begin()
            tracer.updating = True

        def leave(*_: Any) -> None:
            tracer.updating = False

        try:
            code.update(added)
            groups, first = optimizer.param_groups, self._first_state()
            optimizer.param_groups = [
                {**self._numbers(f"{self.name}.{at}", group), **_PLAIN, "params": self._parameters(group["params"])}
                for at, group in enumerate(groups)
            ]
            optimizer.state = self._state(groups, first)
            optimizer._optimizer_step_pre_hooks = OrderedDict(optimizer._optimizer_step_pre_hooks)
            optimizer._optimizer_step_post_hooks = OrderedDict(optimizer._optimizer_step_post_hooks)
            optimizer.register_step_pre_hook(enter)
            optimizer.register_step_post_hook(leave)
            before = self._python_values()
            yield
            if any(now is not before.get(key) for key, now in self._python_values().items()):
                raise CaptureError(
                    f"the step changes numbers of {self.name} in Python, which a program cannot: step schedulers "
                    "outside of it, after each step; an optimizer of your own counts its steps in a tensor"
                )
            # A scheduler warns of an optimizer that it has not seen making a step: the program makes them.
            if vars(optimizer).get("_opt_called"):
                attributes["_opt_called"] = True
        finally:
            for one in added:
                del code[one]
            vars(optimizer).clear()
            vars(optimizer).update(attributes)

    def _python_values(self) -> dict[Any, Any]:
        places = [
            *enumerate(self.optimizer.param_groups),
            *((id(one), values) for one, values in self.optimizer.state.items()),
        ]
        return {
            (at, key): value
            for at, values in places
            for key, value in values.items()
            if not isinstance(value, torch.Tensor)
        }

    def _parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        if strange := [tuple(one.shape) for one in parameters if id(one) not in self.owned]:
            raise CaptureError(f"the optimizer has parameters of no model that is an argument: shapes {strange}")
        return [self.owned[id(one)][1] for one in parameters]

    def _numbers(self, name: str, group: dict[str, Any]) -> dict[str, Any]:
        def number(key: str, value: Any, index: int | None = None) -> Any:
            tensor = isinstance(value, torch.Tensor) and value.numel() == 1
            if not (tensor or isinstance(value, float) or (key in _FLOATS and type(value) is int)):
                return value
            path = f"{name}.{key}" if index is None else f"{name}.{key}.{index}"
            self.tracer.scalars.add(path, group, key, index)
            return self.tracer.number(path, float(value))

        return {
            key: tuple(number(key, one, at) for at, one in enumerate(value))
            if isinstance(value, tuple)
            else number(key, value)
            for key, value in group.items()
        }

    def _first_state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        optimizer = self.optimizer
        state, groups = optimizer.state, optimizer.param_groups
        missing = [one for group in groups for one in group["params"] if one.requires_grad and not state.get(one)]
        stand_ins = {one: self.tracer.like(one) for one in missing}
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [
            {**group, **_PLAIN, "params": [stand_ins[one] for one in group["params"] if one in stand_ins]}
            for group in groups
        ]
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise CaptureError(
                f"{type(optimizer).__name__} calls the model in its step: use an optimizer that does not"
            )
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        with self.tracer.fake, _Fills():  # type: ignore[no-untyped-call]  # of torch
            for one in stand_ins.values():
                one.grad = torch.empty_like(one)
            type(optimizer).step(optimizer)
        made = optimizer.state
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        return {**state, **{one: dict(made[stand_in]) for one, stand_in in stand_ins.items()}}

    def _state(self, groups: list[dict[str, Any]], first: Any) -> defaultdict[torch.Tensor, Any]:
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for at, group in enumerate(groups):
            steps: dict[tuple[str, float], int] = {}
            for parameter in group["params"]:
                for key, value in first.get(parameter, {}).items():
                    state[self.owned[id(parameter)][1]][key] = (
                        self._state_of(f"{self.name}.{at}", group, steps, parameter, key, value)
                        if isinstance(value, torch.Tensor)
                        else value
                    )
        return state

    def _state_of(
        self,
        group_name: str,
        group: dict[str, Any],
        steps: dict[tuple[str, float], int],
        parameter: torch.Tensor,
        key: str,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """The input for a state; the numbers of steps of the parameters of a group are one input while they agree."""
        name = self.owned[id(parameter)][0]
        fill = getattr(value, "fill", None)
        if fill is None and isinstance(value, FakeTensor):
            if key != "momentum_buffer" or group.get("dampening"):
                raise CaptureError(f"the first {key} of {name} depends on gradients: take one step before the capture")
            fill = 0.0
        if fill is None and value.device.type == "meta":
            fill = group.get("initial_accumulator_value", 0.0)
        first: dict[str, Any] = {"fill": fill} if fill is not None else {"value": value.detach().clone()}
        if value.dim() or (not parameter.dim() and key not in _COUNTS):
            return self.tracer.input(value, f"{key}/{name}", "state", parameter=name, **first)
        now = float(value) if fill is None else fill
        slot = steps.get((key, now))
        suffix = f".{len(steps)}" if steps else ""
        fake = self.tracer.input(value, f"{key}/{group_name}{suffix}", "state", slot=slot, **first)
        steps[key, now] = self.tracer.read(fake)
        self.tracer.share(fake)
        return fake


class _Fills(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.5  # any number: 1 would make 1 - 1, and divide by it
        result: Any = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            fill: float | None = None
            match func._opname:
                case "zeros" | "zeros_like" | "new_zeros":
                    fill = 0.0
                case "ones" | "ones_like" | "new_ones":
                    fill = 1.0
                case "full" | "full_like" | "new_full":
                    fill = float(args[-1])
                case "lift_fresh" if args[0].dim() == 0:
                    fill = _number_of(args[0])
                case "detach" | "clone":
                    fill = getattr(args[0], "fill", None)
            if fill is not None:
                vars(result)["fill"] = fill
        return result


def _number_of(tensor: torch.Tensor) -> float:
    with _disable_current_modes():
        return float(tensor)
