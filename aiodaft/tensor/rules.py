"""How an operation can be placed: torch's table of placements, asked without a process group.

Only this module and `capture` use private names of torch. The table has wrong entries: `verified.txt` lists the kinds
of placements with which tests found an operation equal to that of one device. With others it is done whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from aiodaft.tensor.instructions import ByRank
from aiodaft.tensor.specs import Meta, Placements, Spec

__all__ = ["Move", "Placing", "Rules", "norm_of", "strided", "verified"]

aten = torch.ops.aten
_TABLE = DTensor._op_dispatcher.sharding_propagator


class Move(NamedTuple):
    """One step of a redistribution: the placement on one axis changes."""

    axis: int
    source: Placement
    target: Placement


@dataclass(frozen=True, slots=True)
class Placing:
    """A way to do an operation in parts.

    Attributes:
        target: The operation on local tensors.
        inputs: The placements that its tensors need, in the order in which they stand in the arguments.
        args: Its arguments, with `Spec`s for tensors and `ByRank` for what depends on the rank.
        outputs: What it makes: a `Spec`, None, or several of them.
    """

    target: OpOverload[..., Any]
    inputs: tuple[Placements, ...]
    args: tuple[Any, ...]
    outputs: Any


class Rules:
    """The placements of operations on a group with named axes.

    Args:
        axes: Names and sizes of the axes; ranks are row-major.
        table: `verified`: entries of torch's table that tests have verified; `torch`: all of them.
    """

    def __init__(self, axes: Mapping[str, int], table: Literal["verified", "torch"] = "torch") -> None:
        self.axes = dict(axes)
        self.table = table
        self.size = math.prod(axes.values())
        grid = torch.arange(self.size).view(*axes.values())
        self._meshes = [
            DeviceMesh("cpu", grid, mesh_dim_names=tuple(axes), _init_backend=False, _rank=rank)
            for rank in range(self.size)
        ]
        self._sizes = tuple(axes.values())
        self._theirs: dict[Spec, DTensorSpec] = {}
        self._shapes: dict[Spec, tuple[tuple[int, ...], ...]] = {}

    def place(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placing | None:
        """How an operation is done in parts; None if it has to be done whole."""
        if any(isinstance(one, Spec) for one in tree_leaves(dict(kwargs))):
            return None
        placing = self._placing(op, args, kwargs)
        if placing is None and any(p.is_partial() for one in _specs(args) for p in one.placements):
            return self._placing(op, tree_map(_reduced, args), kwargs)
        return placing

    def allows(self, op: str, kind: str) -> bool:
        """Whether an operation is right with placements of this kind."""
        if kind == "r" or self.table == "torch":
            return True
        level = _LEVELS.index(kind[0])
        return any(one[1:] == kind[1:] and _LEVELS.index(one[0]) >= level for one in verified().get(op, ()))

    def kind(self, placing: Placing, given: Sequence[Spec]) -> str:
        """The placements of an operation in short.

        The first letter says the parts: r replicas, s equal shards, u uneven ones, e some of them empty. The others say
        which terms there are: p of a sum, a of a mean, m of a maximum or minimum, q of a product, n of a norm; and x
        for strided parts.
        """
        tensors = [spec.at(placements) for spec, placements in zip(given, placing.inputs, strict=True)]
        tensors += _specs(placing.outputs)
        level = max((self._level(one) for one in tensors), key=_LEVELS.index, default="r")
        flags = {_flag(placement) for one in tensors for placement in one.placements}
        return level + "".join(sorted(flags - {""}))

    def _level(self, spec: Spec) -> str:
        if not any(isinstance(one, Shard | _StridedShard) for one in spec.placements):
            return "r"
        shapes = self.local_shapes(spec)
        if 0 not in spec.meta.shape and any(0 in shape for shape in shapes):
            return "e"
        return "u" if len(set(shapes)) > 1 else "s"

    def _placing(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placing | None:
        info = _schema_info(op, args)
        schema = OpSchema(op, tree_map(self._their, args), dict(kwargs), schema_info=info)
        try:
            sharding = cast(OutputSharding, _TABLE.propagate_op_sharding(schema))
        except Exception:  # noqa: BLE001 - the table refuses an operation by errors of many kinds.
            return None
        deep = info is not None and info.needs_pytree
        wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
        have = tree_leaves(args) if deep else list(args)
        want = list(tree_leaves((wanted or schema).args_schema) if deep else (wanted or schema).args_schema)
        inputs = tuple(
            (one if isinstance(one, DTensorSpec) else self._their(given)).placements
            for given, one in zip(have, want, strict=False)
            if isinstance(given, Spec)
        )
        target = wanted.op if wanted is not None else op
        if target is not op:
            largs = (args[0], *wanted.args_schema[1:])  # type: ignore[union-attr]  # `wanted` made it another one
        elif sharding.use_val_from_redistribute_schema:
            local = [
                g if isinstance(g, Spec) else self._by_rank(op, i, g, w, sharding)
                for i, (g, w) in enumerate(zip(have, want, strict=True))
            ]
            largs = tuple(tree_unflatten(local, tree_flatten(args)[1])) if deep else tuple(local)
        else:
            largs = args
        placing = Placing(target, inputs, largs, self._ours(sharding.output_spec))
        given = _specs(have)
        if self._is_wrong(placing, given) or not self.allows(str(op), self.kind(placing, given)):
            return None
        return placing

    def route(self, source: Spec, target: Placements) -> Iterator[Move]:
        """The steps of a redistribution, in their order."""
        for info in _gen_transform_infos(self._their(source), self._their(source.at(target))):
            yield Move(info.mesh_dim, *info.src_dst_placements)

    def local_shapes(self, spec: Spec) -> tuple[tuple[int, ...], ...]:
        """The shape of the local tensor, by rank."""
        known = self._shapes.get(spec)
        if known is None:
            known = self._shapes[spec] = tuple(
                tuple(
                    compute_local_shape_and_global_offset(spec.meta.shape, mesh, spec.placements, skip_offset=True)[0]
                )
                for mesh in self._meshes
            )
        return known

    def offset(self, spec: Spec, rank: int) -> tuple[int, ...]:
        """Where the part of a rank begins in the whole tensor."""
        return tuple(compute_local_shape_and_global_offset(spec.meta.shape, self._meshes[rank], spec.placements)[1])

    def local_bytes(self, spec: Spec) -> tuple[int, ...]:
        """The size of the local tensor, by rank."""
        return tuple(math.prod(shape) * spec.meta.dtype.itemsize for shape in self.local_shapes(spec))

    def _their(self, one: Any) -> Any:
        if not isinstance(one, Spec):
            return one
        known = self._theirs.get(one)
        if known is None:
            meta = TensorMeta(torch.Size(one.meta.shape), one.meta.stride, one.meta.dtype)
            known = self._theirs[one] = DTensorSpec(self._meshes[0], one.placements, tensor_meta=meta)
        return known

    def _ours(self, given: Any) -> Any:
        if isinstance(given, DTensorSpec):
            meta = given.tensor_meta
            assert meta is not None
            return Spec(given.placements, Meta(tuple(meta.shape), tuple(meta.stride), meta.dtype))
        return type(given)(self._ours(one) for one in given) if isinstance(given, tuple | list) else None

    def _by_rank(self, op: OpOverload[..., Any], index: int, given: Any, want: Any, sharding: OutputSharding) -> Any:
        """A shape or a stride among the arguments, which is that of the local tensor."""
        at = _TABLE.op_to_shape_and_stride_idx.get(op)
        if at is None or index not in (at if isinstance(at, tuple) else (at,)):
            return want
        out = self._ours(sharding.output_spec)
        by_rank = self.local_shapes(out)
        if isinstance(at, tuple) and index == at[1]:
            by_rank = tuple(_strides_like(out.meta.stride, shape) for shape in by_rank)
        return list(by_rank[0]) if len(set(by_rank)) == 1 else ByRank(tuple(list(one) for one in by_rank))

    def _is_uneven(self, spec: Spec, placements: Placements, axis: int) -> bool:
        placement = placements[axis]
        return isinstance(placement, Shard) and spec.meta.shape[placement.dim] % self._sizes[axis] != 0

    def _is_wrong(self, placing: Placing, given: list[Spec]) -> bool:
        """Whether the table is known to be wrong about it.

        Of uneven parts it takes the mean of means; it keeps masks in a buffer of torch's process group; and a maximum
        of sums is not the sum of maxima.
        """
        outs = _specs(placing.outputs)
        for placements in (*placing.inputs, *(one.placements for one in outs)):
            linear = {one.reduce_op in ("sum", "avg") for one in placements if isinstance(one, Partial)}
            if len(linear) > 1 or any(isinstance(one, _MaskPartial) for one in placements):
                return True
        means = {axis for one in outs for axis, p in enumerate(one.placements) if getattr(p, "reduce_op", "") == "avg"}
        return any(
            self._is_uneven(spec, placements, axis)
            for spec, placements in zip(given, placing.inputs, strict=True)
            for axis in means
        )


_LEVELS: Final = "rsue"
_TERMS: Final = {"sum": "p", "avg": "a", "max": "m", "min": "m", "product": "q"}


@cache
def verified() -> Mapping[str, frozenset[str]]:
    """The kinds of placements that are right, by operation."""
    lines = resources.files("aiodaft.tensor").joinpath("verified.txt").read_text().splitlines()
    return {f"aten.{name}": frozenset(kinds) for name, *kinds in map(str.split, lines)}


def _flag(placement: Placement) -> str:
    if norm_of(placement) is not None:
        return "n"
    if isinstance(placement, _StridedShard):
        return "x"
    return _TERMS.get(placement.reduce_op, "?") if isinstance(placement, Partial) else ""


def _reduced(one: Any) -> Any:
    """Without terms of sums."""
    if not isinstance(one, Spec):
        return one
    return one.at(tuple(Replicate() if placement.is_partial() else placement for placement in one.placements))


def _specs(values: Any) -> list[Spec]:
    return [one for one in tree_leaves(values) if isinstance(one, Spec)]


def norm_of(placement: Placement) -> float | None:
    """The P of a partial P-norm; torch lets these pass through sums, which is wrong, so they are reduced at once."""
    return float(cast(Any, placement).norm_type) if type(placement).__name__ == "_NormPartial" else None


def strided(placement: Placement) -> tuple[int, int] | None:
    """The dimension and the factor of a strided part, which a view of a sharded inner dimension gives."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def _strides_like(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape with the order of dimensions of these strides."""
    result, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _schema_info(op: OpOverload[..., Any], args: tuple[Any, ...]) -> RuntimeSchemaInfo | None:
    info = _TABLE.op_to_schema_info.get(op) or _TABLE.op_to_schema_info_for_single_dim_strategy.get(op)
    if info is None and any(isinstance(one, list | tuple) and any(isinstance(x, Spec) for x in one) for one in args):
        return RuntimeSchemaInfo(needs_pytree=True)
    return info
