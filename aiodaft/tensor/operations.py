"""Operations on whole tensors, as one device does them: the words of a program, which knows no strategy and no axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from aiodaft.tensor.specs import Meta

__all__ = [
    "Arguments",
    "Cause",
    "Gradient",
    "Input",
    "Mark",
    "Operation",
    "Output",
    "Phase",
    "Results",
    "Role",
    "Trace",
]

Phase: TypeAlias = Literal["forward", "backward", "update"]

Role: TypeAlias = Literal["parameter", "buffer", "state", "scalar", "argument", "constant"]
"""The owner of an input: the model (parameters and buffers), the optimizer (state, and scalars such as its learning
rate), the caller of the step (arguments), or the program itself (constants)."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The place in the user's code that an operation comes from.

    Attributes:
        module: The path of the module, such as `blocks.0.attn`; empty outside of modules.
        line: The line of the user's code, such as `gpt.py:24`; a line of backward is that of its forward operation.
    """

    operation: str
    module: str = ""
    line: str = ""
    phase: Phase = "forward"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch on whole tensors; `Slot`s stand for tensors, also in lists.

    A slot without a meta is a number of Python, such as a learning rate or `beta ** step`: `aten.mul.float` and the
    like make them of others, and operations on tensors take them as scalars. An operation that writes to a tensor
    (`aten.add_.Tensor`) gives it a new number, in the same memory: no operation reads the old one afterwards.

    Attributes:
        outs: The numbers of the tensors that it makes, in their order; None for a result that is no tensor or that
            nobody uses.
    """

    target: torch._ops.OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int | None, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Mark:
    """The output (or an input) of a module, or the gradient of one: the place where a strategy speaks."""

    module: str
    side: Literal["in", "out"]
    gradient: bool
    source: int
    out: int
    cause: Cause
    forward: int | None = None
    """Of a gradient, the number beyond its mark of the tensor that it is the gradient of."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The complete gradient of a parameter where the update begins, placed as the optimizer's state."""

    parameter: str
    source: int
    out: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program takes.

    Attributes:
        name: Its name: of a parameter or buffer its path in the model, of a state `exp_avg/PARAMETER`, of an argument
            the name in the signature of the function (`batch.x` for a part of it).
        value: The tensor of a constant, or the first value of a state or of a buffer that no checkpoint has.
        fill: The first value of each element of a state that has no `value`.
    """

    slot: int
    name: str
    role: Role
    parameter: str = ""
    value: torch.Tensor | None = None
    fill: float | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    slot: int
    name: str
    role: Literal["result"] | Role
    stage: int = 0


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of the step, without models and optimizers.

    Attributes:
        leaves: For each leaf the name of its input and its meta, or the value that it must equal.
    """

    tree: TreeSpec
    leaves: tuple[tuple[str, Meta | None, Any], ...]

    def bind(self, *args: Any) -> dict[str, torch.Tensor]:
        """The tensors of these arguments, by the name of their input."""
        leaves, tree = tree_flatten(args)
        if tree != self.tree:
            names = ", ".join(dict.fromkeys(name.partition(".")[0] for name, *_ in self.leaves)) or "none"
            raise TypeError(
                f"the step takes the arguments {names}, with parts as captured ({self.tree}); these are {len(args)} "
                f"({tree})"
            )
        tensors: dict[str, torch.Tensor] = {}
        for given, (name, meta, value) in zip(leaves, self.leaves, strict=True):
            if meta is None:
                if given is not value and given != value:
                    raise TypeError(f"{name} is {given!r}, and the step was captured with {value!r}: capture it again")
            elif not isinstance(given, torch.Tensor) or (tuple(given.shape), given.dtype) != (meta.shape, meta.dtype):
                found = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, torch.Tensor) else repr(given)
                raise ValueError(
                    f"{name} is {found}, and the step was captured with {meta.shape} {meta.dtype}: capture it again"
                )
            else:
                tensors[name] = given
        return tensors


@dataclass(frozen=True)
class Results:
    """The structure of the results of the function.

    Attributes:
        others: The leaves that are no tensors, by their place. The others are the outputs with the role `result`.
    """

    tree: TreeSpec
    others: Mapping[int, Any] = field(default_factory=dict)

    def build(self, tensors: Iterable[Any]) -> Any:
        rest = iter(tensors)
        places = range(self.tree.num_leaves)
        return tree_unflatten([self.others[at] if at in self.others else next(rest) for at in places], self.tree)


@dataclass(frozen=True)
class Trace:
    """The operations of one step.

    Attributes:
        metas: Shape, stride and dtype of each tensor, by its number.
        scalars: The values of scalars now, by name: read before each step, so that a scheduler changes them.
        aliases: Further names that a parameter or buffer has in the model, each with the name of its input.
    """

    inputs: tuple[Input, ...]
    operations: tuple[Operation | Mark | Gradient, ...]
    outputs: tuple[Output, ...]
    metas: Mapping[int, Meta]
    arguments: Arguments
    results: Results
    scalars: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
