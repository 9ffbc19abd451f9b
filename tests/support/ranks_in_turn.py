"""Instructions of all ranks, in turn, in one process. It shares no code with the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.utils._pytree import tree_map

from aiodaft.tensor.instructions import ByRank, Instruction, Slot
from aiodaft.tensor.specs import Placements

__all__ = ["parts", "run"]

Tables = dict[int, list[Tensor]]
"""The local tensor of each rank, by number."""


def parts(whole: Tensor, placements: Placements, sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """The local tensor of each rank; ranks are row-major."""
    if not sizes:
        return [whole.clone()]
    match placements[0]:
        case Shard(dim=dim):
            mine = cut(whole, sizes[0], dim)
        case Partial(reduce_op="max"):
            below = [torch.rand(whole.shape, generator=generator).to(whole.dtype) for _ in range(sizes[0] - 1)]
            mine = [whole, *(whole - one for one in below)]
        case Partial(reduce_op=operation):
            # Multiples of it whose sum is exact.
            factors = [1 if rank % 2 == 0 else -1 for rank in range(sizes[0])]
            factors[0] += 1 - sum(factors)
            mine = [whole * factor * (sizes[0] if operation == "avg" else 1) for factor in factors]
        case _:
            mine = [whole] * sizes[0]
    return [one for part in mine for one in parts(part, placements[1:], sizes[1:], generator)]


def run(instructions: Sequence[Instruction], tables: Tables, axes: Mapping[str, int]) -> None:
    """Do the instructions; their results come into the tables."""
    size = math.prod(axes.values())
    grid = torch.arange(size).view(*axes.values())
    rows = {axis: grid.movedim(at, -1).reshape(-1, axes[axis]).tolist() for at, axis in enumerate(axes)}
    for one in instructions:
        local = [tree_map(_of_rank(tables, rank), (one.args, dict(one.kwargs))) for rank in range(size)]
        if one.kind == "op":
            results = [_results(_done(one.target, args, kwargs)) for args, kwargs in local]
            for place, out in enumerate(one.outs):
                if out is not None:
                    tables[out] = [result[place] for result in results]
            continue
        out = [torch.empty(0)] * size
        for row in rows[one.target] if one.target is not None else [[rank] for rank in range(size)]:
            for rank, result in zip(
                row, _KINDS[one.kind](*zip(*(local[rank][0] for rank in row), strict=True)), strict=True
            ):
                out[rank] = result
        (number,) = one.outs
        tables[number] = out


def cut(x: Tensor, n: int, dim: int) -> list[Tensor]:
    """As torch.chunk, with empty parts at the end."""
    some = list(x.chunk(n, dim)) if x.shape[dim] else []
    return [one.contiguous() for one in some] + [x.narrow(dim, 0, 0)] * (n - len(some))


def _of_rank(tables: Tables, rank: int) -> Callable[[Any], Any]:
    def local(value: Any) -> Any:
        match value:
            case Slot(number=number):
                return tables[number][rank]
            case ByRank(values=values):
                return values[rank]
        return value

    return local


def _done(name: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    space, packet, overload = str(name).split(".")
    if packet in ("view", "_unsafe_view"):
        packet = "reshape"
    result = getattr(getattr(getattr(torch.ops, space), packet), overload)(*args, **kwargs)
    return result.zero_() if "empty" in packet else result


def _results(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _reduced(terms: Sequence[Tensor], operation: str) -> Tensor:
    stacked = torch.stack(tuple(terms))
    if operation.startswith("norm:"):
        return torch.linalg.vector_norm(stacked, float(operation.removeprefix("norm:")), dim=0)
    if stacked.dtype == torch.bool:
        return stacked.all(0) if operation in ("product", "min") else stacked.any(0)
    match operation:
        case "sum" | "avg":
            total = stacked.sum(0, dtype=stacked.dtype)
            return total / len(stacked) if operation == "avg" else total
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
    return stacked.prod(0, dtype=stacked.dtype)


def _all_reduce(terms: Sequence[Tensor], operations: Sequence[str]) -> list[Tensor]:
    return [_reduced(terms, operations[0]) for _ in terms]


def _reduce_scatter(terms: Sequence[Tensor], dims: Sequence[int], operations: Sequence[str]) -> list[Tensor]:
    return cut(_reduced(terms, operations[0]), len(terms), dims[0])


def _all_gather(some: Sequence[Tensor], dims: Sequence[int], factors: Sequence[int] = (1,)) -> list[Tensor]:
    dim, factor = dims[0], factors[0]
    return [torch.cat([_seen(one, dim, factor) for one in some], dim + 1).flatten(dim, dim + 1) for _ in some]


def _all_to_all(some: Sequence[Tensor], wholes: Sequence[int], cuts: Sequence[int]) -> list[Tensor]:
    return cut(torch.cat(tuple(some), wholes[0]), len(some), cuts[0])


def _seen(x: Tensor, dim: int, factor: int) -> Tensor:
    return x.reshape(*x.shape[:dim], factor, x.shape[dim] // factor, *x.shape[dim + 1 :])


def _chunk(some: Sequence[Tensor], dims: Sequence[int], factors: Sequence[int] = (1,)) -> list[Tensor]:
    dim, factor = dims[0], factors[0]
    pieces = [cut(_seen(one, dim, factor), len(some), dim + 1) for one in some]
    return [mine[rank].flatten(dim, dim + 1) for rank, mine in enumerate(pieces)]


def _partition(some: Sequence[Tensor], operations: Sequence[str]) -> list[Tensor]:
    neutral = {"sum": 0, "product": 1}.get(operations[0])
    return [one if not rank or neutral is None else torch.full_like(one, neutral) for rank, one in enumerate(some)]


def _embedding(weights: Sequence[Tensor], indices: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    first, found = 0, []
    for weight, index in zip(weights, indices, strict=True):
        padded = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        is_here = (index >= first) & (index < first + len(weight))
        found.append(padded[torch.where(is_here, index - first, len(weight))])
        first += len(weight)
    assert first == rows[0], f"{first} rows of {rows[0]}"
    return found


_KINDS: dict[str, Callable[..., list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "chunk": _chunk,
    "partition": _partition,
    "embedding": _embedding,
    "alias": lambda some: list(some),
}
