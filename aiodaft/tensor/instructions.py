"""The instructions of a worker: plain data, without the parts of torch that only planning needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Slot:
    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True, slots=True)
class ByRank:
    values: tuple[object, ...]


CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

Kind: TypeAlias = (
    CollectiveKind
    | Literal[
        "op",  # target: name of an operation ("aten.mm.default"), on local tensors
        "chunk",  # target: axis; args (x, dim): this rank's part of a replicated tensor
        "partition",  # target: axis; args (x, reduce_op): a replicated tensor as a term of a sum
        "embedding",  # target: axis; args (weight, index, rows of the whole): rows that others have are zero
        "join",  # args ([x, ...]): one flat tensor of several
        "split",  # args (flat, [shape, ...]): the tensors that `join` took
        "alias",  # args (x,)
        "local",  # target: name of a function of the user, on local tensors
        "random",  # see randoms.py
        "send",  # target: axis of a pipeline; args (x, stage, number): to the rank of that stage, under that number
        "receive",  # target: axis of a pipeline; args (stage, number): the tensor of that number, from that stage
    ]
)


class Instruction(NamedTuple):
    """A step of a worker. `args` and `kwargs` have `Slot`s for local tensors and `ByRank` for what differs by rank.

    Of collectives `target` is the axis, and the arguments are:
        all_reduce (x, reduce_op); all_gather (x, dim); reduce_scatter (x, dim, reduce_op);
        all_to_all (x, dim that is whole afterwards, dim that is cut afterwards).
    `all_gather` and `chunk` with a third argument, the factor, are of strided parts: `dim` is seen as (factor, rest)
    and the rest is cut. `reduce_op` is sum, avg, min, max or product; `norm:P` is the P-norm of norms.
    """

    kind: Kind
    target: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int | None, ...]


def slots_of(value: object) -> list[int]:
    match value:
        case Slot(number=number):
            return [number]
        case list() | tuple():
            return [number for one in value for number in slots_of(one)]
        case Mapping():
            return [number for one in value.values() for number in slots_of(one)]
    return []


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with all that is in its lists, tuples and dictionaries changed; faster than a pytree of torch."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(change, one) for one in value])
    if kind is list:
        return [mapped(change, one) for one in value]
    if kind is dict:
        return {name: mapped(change, one) for name, one in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for one in value for leaf in leaves(one)]
    if kind is dict:
        return [leaf for one in value.values() for leaf in leaves(one)]
    return [value]


@cache
def operation(name: str) -> OpOverload[..., Any]:
    namespace, packet, overload = name.split(".")
    found: OpOverload[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found
