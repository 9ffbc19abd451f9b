"""Torch's table of the placements that an operation can have, asked without a process group.

With `capture`, the only importer of private names of torch. Where a version of torch lacks one, it cannot be imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from aiodaft.tensor.instructions import ByRank, mapped
from aiodaft.tensor.specs import Meta, Placements, Spec

_PROPAGATOR = DTensor._op_dispatcher.sharding_propagator


# How operations are placed, by axes, operation and arguments.
_KNOWN: dict[tuple[Any, ...], Any] = {}


class Answer(NamedTuple):
    """The cheapest placements of an operation; see `rules.Placing`."""

    target: OpOverload[..., Any]
    inputs: tuple[Placements, ...]
    args: tuple[Any, ...]
    outputs: Any


class Table:
    """The table for a group with named axes."""

    def __init__(self, axes: Mapping[str, int], shapes: Callable[[Spec], tuple[tuple[int, ...], ...]]) -> None:
        ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
        try:
            self._mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes), _init_backend=False, _rank=0)
        except TypeError as error:
            raise NotImplementedError(f"a mesh of torch {torch.__version__} needs a process group") from error
        self._axes = tuple(axes.items())
        self._shapes = shapes
        self._theirs: dict[Spec, DTensorSpec] = {}

    def ask(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer | None:
        args = _counted(op, args)
        info = _schema_info(op, args)
        schema = OpSchema(op, mapped(self._their, args), dict(kwargs), schema_info=info)
        try:
            # The cache of torch takes True, 1 and 1.0 for one argument, and dtypes depend on that.
            key = (self._axes, op, _typed(args), _typed(kwargs))
            sharding = _KNOWN.get(key)
            if sharding is None:
                sharding = _KNOWN[key] = _PROPAGATOR.propagate_op_sharding_non_cached(schema)
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
        local = args
        if wanted is not None and target is not op:
            local = (args[0], *wanted.args_schema[1:])
        elif sharding.use_val_from_redistribute_schema:
            values = [
                g if isinstance(g, Spec) else self._by_rank(op, i, w, sharding)
                for i, (g, w) in enumerate(zip(have, want, strict=True))
            ]
            local = tuple(tree_unflatten(values, tree_flatten(args)[1])) if deep else tuple(values)
        return Answer(target, inputs, local, self._ours(sharding.output_spec))

    def _their(self, one: Any) -> Any:
        if not isinstance(one, Spec):
            return one
        known = self._theirs.get(one)
        if known is None:
            meta = TensorMeta(torch.Size(one.meta.shape), one.meta.stride, one.meta.dtype)
            known = self._theirs[one] = DTensorSpec(self._mesh, one.placements, tensor_meta=meta)
        return known

    def _ours(self, given: Any) -> Any:
        if isinstance(given, DTensorSpec):
            meta = cast(TensorMeta, given.tensor_meta)
            return Spec(given.placements, Meta(tuple(meta.shape), tuple(meta.stride), meta.dtype))
        return type(given)(self._ours(one) for one in given) if isinstance(given, tuple | list) else None

    def _by_rank(self, op: OpOverload[..., Any], index: int, want: Any, sharding: OutputSharding) -> Any:
        at = _PROPAGATOR.op_to_shape_and_stride_idx.get(op)
        if at is None or index not in (at if isinstance(at, tuple) else (at,)):
            return want
        out = self._ours(sharding.output_spec)
        by_rank = self._shapes(out)
        if isinstance(at, tuple) and index == at[1]:
            by_rank = tuple(_strides_like(out.meta.stride, shape) for shape in by_rank)
        return list(by_rank[0]) if len(set(by_rank)) == 1 else ByRank(tuple(list(one) for one in by_rank))


def _counted(op: OpOverload[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a dimension that counts from 0: torch's `cumsum`, `slice_backward` and the like know no other.

    That of `unsqueeze` and `stack` is one of the result, and they count by themselves.
    """
    names = [one.name for one in op._schema.arguments[: len(args)]]
    if "dim" not in names or not isinstance(args[0], Spec) or op._opname.startswith("unsqueeze"):
        return args
    at = names.index("dim")
    shape = args[names.index("input_sizes")] if "input_sizes" in names else args[0].meta.shape
    if type(args[at]) is not int or args[at] >= 0:
        return args
    return (*args[:at], args[at] + len(shape), *args[at + 1 :])


def _typed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _typed(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_typed, value))
    return value if isinstance(value, Spec) else (type(value), value)


def _strides_like(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    result, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _schema_info(op: OpOverload[..., Any], args: tuple[Any, ...]) -> RuntimeSchemaInfo | None:
    # The second table came with torch 2.10.
    single = getattr(_PROPAGATOR, "op_to_schema_info_for_single_dim_strategy", {})
    info = _PROPAGATOR.op_to_schema_info.get(op) or single.get(op)
    if info is None and any(isinstance(one, list | tuple) and any(isinstance(x, Spec) for x in one) for one in args):
        return RuntimeSchemaInfo(needs_pytree=True)
    return cast("RuntimeSchemaInfo | None", info)
