"""Numbers of a program: a learning rate, a step's number, and the arithmetic of an optimizer on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode


class OnNumbers(Protocol):
    def arithmetic(self, target: torch._ops.OpOverload[..., Any], *args: Number | float) -> Number: ...

    def used(self) -> Exception:
        """The error where Python wants the value of a number, or of a tensor."""
        ...

    def decided(self, number: Number, comparison: Callable[[Any, Any], bool], other: float) -> bool: ...


class _Node:
    """The part of a number that C++ sees on the way to the dispatch of torch."""

    def __init__(self, number: Number) -> None:
        self.number = number

    def is_float(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return True

    def _no(self) -> bool:
        return False

    is_int = is_bool = is_constant = is_nested_int = _no

    def _graph_repr(self) -> str:
        return f"%{self.number.slot}"

    __str__ = _str = _graph_repr

    def guard_float(self, file: str, line: int) -> float:
        raise self.number.recorder.used()


class Number(torch.SymFloat):
    """A float of a program: operations on it are recorded.

    Attributes:
        value: Its value during the capture, of inputs that Python may compare.
    """

    def __init__(self, recorder: OnNumbers, slot: int, value: float | None = None) -> None:
        super().__init__(_Node(self))  # type: ignore[no-untyped-call]  # of torch
        self.recorder, self.slot, self.value = recorder, slot, value

    def __float__(self) -> float:
        raise self.recorder.used()

    def __trunc__(self) -> Any:
        raise self.recorder.used()

    __int__ = __trunc__

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = object.__hash__

    def __neg__(self) -> Number:
        return self.recorder.arithmetic(torch.ops.aten.neg.float, self)

    def __pos__(self) -> Number:
        return self

    def sqrt(self) -> Number:
        return self.recorder.arithmetic(torch.ops.aten.sqrt.float, self)


class Items(TorchFunctionMode):
    """Calls that no dispatch sees as they are: `Tensor.item`, of whose `Number` C++ makes a `SymFloat`, and `data`."""

    def __init__(self, recorder: OnNumbers) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON:
            raise self.recorder.used()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]  # a descriptor of C
            with torch.no_grad():
                return args[0].copy_(args[1])
        result = func(*args, **(kwargs or {}))
        ours = isinstance(result, torch.SymFloat) and isinstance(result.node, _Node)
        return result.node.number if ours else result


_TO_PYTHON = {torch.Tensor.numpy, torch.Tensor.__format__, torch.Tensor.__array__}


def _binary(name: str, target: torch._ops.OpOverload[..., Any]) -> None:
    def forward(self: Number, other: Any) -> Any:
        return self.recorder.arithmetic(target, self, other) if _is_number(other) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        return self.recorder.arithmetic(target, other, self) if _is_number(other) else NotImplemented

    setattr(Number, f"__{name}__", forward)
    setattr(Number, f"__r{name}__", reflected)


def _comparison(name: str) -> None:
    decide = getattr(operator, name)

    def compare(self: Number, other: Any) -> Any:
        return self.recorder.decided(self, decide, other) if _is_number(other) else NotImplemented

    setattr(Number, f"__{name}__", compare)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Number))


for _name, _op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow")):
    _binary(_name, getattr(torch.ops.aten, _op).float)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _extreme(builtin: Callable[..., Any], target: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def extreme(*values: Any, **kwargs: Any) -> Any:
        numbers = [one for one in values if isinstance(one, Number)]
        return numbers[0].recorder.arithmetic(target, *values) if numbers else builtin(*values, **kwargs)

    return extreme


EXTREMES = {"min": _extreme(min, torch.ops.prim.min.float), "max": _extreme(max, torch.ops.prim.max.float)}
"""`min` and `max` of two numbers, for the code of an optimizer."""


class LiveScalars(Mapping[str, Any]):
    """Numbers of optimizers by name, read from their groups when they are asked for."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, ...]] = {}
        self._guards: dict[str, list[tuple[Callable[[Any, Any], bool], float, bool]]] = {}

    def add(self, name: str, group: Mapping[str, Any], key: str, index: int | None) -> None:
        self._places[name] = (group, key, index)

    def guard(self, name: str, comparison: Callable[[Any, Any], bool], other: float, outcome: bool) -> None:
        self._guards.setdefault(name, []).append((comparison, other, outcome))

    def __getitem__(self, name: str) -> float:
        # A number that the code only compares is no input of the program, and nobody reads it.
        for guarded, guards in self._guards.items():
            value = self._value(guarded)
            for comparison, other, outcome in guards:
                if comparison(value, other) != outcome:
                    raise ValueError(
                        f"{guarded} is {value} now, and the step was captured where {comparison.__name__}({guarded}, "
                        f"{other}) was {outcome}: capture it again"
                    )
        return self._value(name)

    def _value(self, name: str) -> float:
        group, key, index = self._places[name]
        return float(group[key] if index is None else group[key][index])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))
