"""Functions of local tensors in code for whole ones: `attend = tensor.local(ring, whole=attention, ...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from aiodaft.tensor.instructions import Instruction


def local(
    function: Callable[..., Any],
    *,
    whole: Callable[..., Any],
    inputs: Sequence[Mapping[str, Any]],
    outputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> Callable[..., Any]:
    """A function of whole tensors that each rank does on its parts, with `current_group().along(axis)` for the others.

        attend = tensor.local(ring, whole=attention, inputs=[{"cp": Shard(2)}] * 3, outputs={"cp": Shard(2)})

    In one process and in a plan without these axes, it is `whole`. Its backward is autograd of `function` at the
    worker; exchanges with other ranks need a backward of their own, in a `torch.autograd.Function`. Plans do not count
    these exchanges.

    Args:
        function: Takes local tensors in the order of `inputs`, and returns a local tensor or a tuple of them. A rank's
            gradient of a replicated input counts as its term of the sum if an output is not replicated.
        whole: The same function of whole tensors; it gives shapes and dtypes, too.
        inputs: By argument, the placement on each axis; replicas on others.
        outputs: The placements of the result, or of each of several. Parts are those of `torch.chunk`.

    Returns:
        The function, for code that is captured, and for distributed tensors.
    """
    several = not isinstance(outputs, Mapping)
    given = tuple(outputs) if not isinstance(outputs, Mapping) else (outputs,)
    made = LocalFunction(_name_of(function), function, whole, tuple(inputs), given, several)
    _LOCALS[made.name] = made
    FUNCTIONS[made.name] = _Forward(made.name, function)
    FUNCTIONS[f"{made.name}, whole"] = _Forward(made.name, whole)
    FUNCTIONS[f"{made.name}, backward"] = _backward
    return made


@dataclass(frozen=True)
class LocalFunction:
    name: str
    function: Callable[..., Any]
    whole: Callable[..., Any]
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[Mapping[str, Any], ...]
    several: bool

    @property
    def axes(self) -> set[str]:
        return {axis for one in (*self.inputs, *self.outputs) for axis in one}

    def __call__(self, *tensors: Tensor) -> Any:
        if len(tensors) != len(self.inputs):
            raise TypeError(f"{self.name} takes {len(self.inputs)} tensors, as `inputs` says, not {len(tensors)}")
        if all(type(one) in (Tensor, torch.nn.Parameter) and not isinstance(one, FakeTensor) for one in tensors):
            return self.whole(*tensors)
        results = _Apply.apply(self.name, *tensors)  # type: ignore[no-untyped-call]  # of torch
        return tuple(results[:-1]) if self.several else results[0]


def functions_of(instructions: Iterable[Instruction]) -> dict[str, Callable[..., Any]]:
    return {str(one.target): FUNCTIONS[str(one.target)] for one in instructions if one.kind == "local"}


def named(name: str) -> LocalFunction:
    return _LOCALS[name]


_LOCALS: Final[dict[str, LocalFunction]] = {}
# What workers call, by the target of an instruction.
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {}


def _name_of(function: Callable[..., Any]) -> str:
    name = base = getattr(function, "__qualname__", type(function).__name__)
    number = 1
    while name in _LOCALS:
        number += 1
        name = f"{base} ({number})"
    return name


def _several(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


# At a worker.


class _Tape:
    """The graph of autograd of a call, for its backward. To the plan it is a tensor without elements."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs

    def gradients(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = [(one, grad) for one, grad in zip(self.outputs, grads, strict=True) if one.requires_grad]
        wanted = [one for one in self.inputs if one.requires_grad]
        outputs, given = [one for one, _ in pairs], [grad for _, grad in pairs]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True) if pairs else [None] * len(wanted))
        return tuple(_or_zeros(next(found), one) if one.requires_grad else one.new_empty(0) for one in self.inputs)


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


@dataclass(frozen=True)
class _Forward:
    name: str
    function: Callable[..., Any]

    def __call__(self, shapes: Sequence[Sequence[int]], *tensors: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            inputs = [one.detach() for one in tensors]
            for one in inputs:
                one.requires_grad_(one.is_floating_point() or one.is_complex())
            outputs = _several(self.function(*inputs))
        found = [list(one.shape) for one in outputs]
        if found != [list(shape) for shape in shapes]:
            raise ValueError(f"{self.name} gave parts of the shapes {found}; by its placements they are {shapes}")
        return (*(one.detach() for one in outputs), _Tape(inputs, outputs))


def _backward(tape: _Tape, *grads: Tensor) -> tuple[Tensor, ...]:
    return tape.gradients(grads)


# In a capture.

_library: Any = torch.library.Library("aiodaft", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
_library.define("local(str name, Tensor[] tensors) -> Tensor[]")
_library.define("local_backward(str name, Tensor[] grads, Tensor[] tensors, Tensor tape) -> Tensor[]")


def _whole(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    outputs = _several(_LOCALS[name].whole(*tensors))
    return [*(one.clone() for one in outputs), tensors[0].new_empty(0, dtype=torch.int64)]


def _whole_backward(name: str, grads: Sequence[Tensor], tensors: Sequence[Tensor], tape: Tensor) -> list[Tensor]:
    if any(isinstance(one, FakeTensor) or one.is_meta for one in tensors):
        return [torch.empty_like(one) if one.is_floating_point() else one.new_empty(0) for one in tensors]
    *_, real = _Forward(name, lambda *given: given)([list(one.shape) for one in tensors], *tensors)
    with torch.enable_grad():
        return list(_Tape(real.inputs, _several(_LOCALS[name].whole(*real.inputs))).gradients(grads))


_library.impl("local", _whole, "CompositeExplicitAutograd")
_library.impl("local_backward", _whole_backward, "CompositeExplicitAutograd")


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        *outputs, tape = torch.ops.aiodaft.local.default(name, list(tensors))
        ctx.name = name
        ctx.save_for_backward(*tensors, tape)
        ctx.mark_non_differentiable(tape)
        return (*outputs, tape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, tape = ctx.saved_tensors
        found = torch.ops.aiodaft.local_backward.default(ctx.name, list(grads[:-1]), tensors, tape)
        return None, *(one if like.is_floating_point() else None for one, like in zip(found, tensors, strict=True))
