"""Operations on whole tensors, as one device does them: the words of a program, which knows no strategy and no axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import TreeSpec

from aiodaft.tensor.specs import Meta

__all__ = ["Argument", "Cause", "Gradient", "Input", "Mark", "Operation", "Output", "Phase", "Role", "Trace"]

Phase: TypeAlias = Literal["forward", "backward", "update"]

Role: TypeAlias = Literal["parameter", "buffer", "state", "scalar", "argument", "constant"]
"""The owner of an input: the model (parameters and buffers), the optimizer (state, and scalars such as its learning
rate), the caller of the step (arguments), or the program itself (constants)."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The place in the user's code that an operation comes from.

    Attributes:
        operation: The name of the operation, such as `aten.mm`.
        module: The path of the module, such as `blocks.0.attn`; empty outside of modules.
        line: The line of the user's code, such as `gpt.py:24`; a line of backward is that of its forward operation.
        phase: The part of the step.
    """

    operation: str
    module: str = ""
    line: str = ""
    phase: Phase = "forward"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch on whole tensors; `Slot`s stand for tensors, also in lists.

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
    """The output (or an input) of a module, or the gradient of one: the place where a strategy speaks.

    Attributes:
        module: The path of the module.
        side: Whether the tensor goes into the module or comes out of it, in the forward direction.
        gradient: Whether it is the gradient of that tensor.
        source: The tensor.
        out: The number of the same tensor beyond the mark.
        forward: Of a gradient, the number beyond its mark of the tensor that it is the gradient of.
    """

    module: str
    side: Literal["in", "out"]
    gradient: bool
    source: int
    out: int
    cause: Cause
    forward: int | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """The complete gradient of a parameter, where the update begins: it takes the placement of the optimizer's state.

    Attributes:
        parameter: The name of the parameter.
        source: The gradient.
        out: The number of the same gradient beyond this step.
    """

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
        parameter: The parameter that a state belongs to; empty for others.
        value: The tensor of a constant.
    """

    slot: int
    name: str
    role: Role
    parameter: str = ""
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the program gives: a result of the function, or the next value of the input with this name."""

    slot: int
    name: str
    role: Literal["result"] | Role


@dataclass(frozen=True, slots=True)
class Argument:
    """A leaf of the arguments of a step: a tensor is the input with this name, anything else stays as it was captured.

    Attributes:
        name: The name, as that of an `Input`.
        value: The value of a leaf that is no tensor.
        is_tensor: Whether it is one.
    """

    name: str
    is_tensor: bool = True
    value: Any = None


@dataclass(frozen=True)
class Trace:
    """The operations of one step.

    Attributes:
        metas: Shape, stride and dtype of each tensor, by its number.
        results: The structure of the results of the function; its leaves are the outputs with the role `result`.
        scalars: The values of scalars now, by name: read before each step, so that a scheduler changes them.
        signature: The structure of `(args, kwargs)` of the function without model and optimizer, as a step is called.
        arguments: Its leaves.
    """

    inputs: tuple[Input, ...]
    operations: tuple[Operation | Mark | Gradient, ...]
    outputs: tuple[Output, ...]
    metas: Mapping[int, Meta]
    results: TreeSpec
    scalars: Mapping[str, Any] = field(default_factory=dict)
    signature: TreeSpec | None = None
    arguments: tuple[Argument, ...] = ()
