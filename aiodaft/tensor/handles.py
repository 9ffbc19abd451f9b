"""Distributed tensors of eager code: torch tensors without data in the controller."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from aiodaft.html import page
from aiodaft.ref import Refs
from aiodaft.tensor.blocks import Cell, Given, Scalar
from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.operations import picture
from aiodaft.tensor.randoms import drawn, is_random, next_place
from aiodaft.tensor.recorder import Recorder
from aiodaft.tensor.specs import Meta, Placements, Spec, checked, placed
from aiodaft.tensor.strategy import Strategy, check_patterns, first
from aiodaft.tensor.transfers import moved
from aiodaft.tensor.views import functional_of

_MOST_BYTES: Final = 1 << 20
_DETACH: Final = torch.ops.aten.detach.default
_FILL: Final = torch.ops.aten.fill_.Tensor
# Operations of which a number decides more than a value, by `id`: torch hashes them in Python.
_EXACT: Final[set[int]] = set()
_PLAIN: Final = frozenset({
    int,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
})

_make = torch.Tensor._make_wrapper_subclass


class DistTensor(Tensor):
    """A tensor whose parts the workers have. Torch code on it is recorded, and runs there in blocks.

    Awaiting it gives the whole tensor. Its shape, dtype, stride and placements are known at once, and errors of shapes
    are raised at the line of the operation. An error at a worker is raised by `await`, with the line.

    Cancellation of an await: nothing else is cancelled.
    """

    cell: Cell
    recorder: Recorder
    draws_itself = True

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its arguments have names here
        cls,
        func: OpOverload[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DETACH:
            return handle(args[0].cell, args[0].recorder)
        exact = id(func) in _EXACT
        key: list[Any] = [id(func)]
        cells: list[Cell] = []
        scalars: list[float] = []
        for one in args:
            kind = type(one)
            if kind is DistTensor:
                key.append(one.cell.layout)
                cells.append(one.cell)
            elif kind is float and not exact:
                key.append(float)
                scalars.append(one)
            elif kind in _PLAIN:
                key += (kind, one)
            elif not _collect(one, exact, key, cells, scalars):
                return _with_plain(func, args, kwargs or {})
        if kwargs and not _collect(kwargs, exact, key, cells, scalars):
            return _with_plain(func, args, kwargs)
        given = tuple(key)
        recorder: Recorder = args[0].recorder if type(args[0]) is DistTensor else _recorder((args, kwargs))
        entry = recorder.entries.known.get(given)
        if entry is None:
            return _first(recorder, given, func, args, kwargs or {})
        outs = recorder.record(entry, cells, scalars)
        result = entry.result
        if result == 0 and type(result) is int:
            return handle(outs[0], recorder)
        return _result(result, outs, recorder, (args, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # theirs takes a keyword
        return f"<DistTensor {self.cell.layout}>"

    def _repr_html_(self) -> str:
        layout = self.cell.layout
        return page(f"DistTensor {layout}", picture(layout.shape, layout.spec.placements, self.recorder.axes))

    def __await__(self) -> Generator[Any, None, Tensor]:
        return self.recorder.fetch(self.cell).__await__()

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement on each axis."""
        layout = self.cell.layout
        return dict(zip(self.recorder.axes, layout.spec.placements, strict=True))

    def refs(self) -> Refs[Tensor]:
        """The local parts, one ref for each rank: ordinary refs, which any actor takes without the controller."""
        return self.recorder.refs(self.cell)

    def redistribute(self, **placements: Placement) -> DistTensor:
        """The same tensor with other placements; an axis that is not named gets replicas.

        It is a copy, or this tensor itself if these are its placements already. Its gradient comes back in the
        placements of this tensor.

        Raises:
            ValueError: There is no such axis.
        """
        target = _placed(self, self.recorder, placements)
        if self.cell.layout.spec.placements == target:
            return self
        moved: DistTensor = _Redistribute.apply(self, target)  # type: ignore[no-untyped-call]  # torch's
        return moved

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`; or, with workers and placements, the same tensor at these workers.

            y = await x.to(others, tp=Shard(0))

        Parts go from process to process: each rank gets each of its elements once. The result is no part of autograd.

        Cancellation: the result is not there; nothing else changes.
        """
        there = getattr(args[0], "recorder", None) if args else None
        return self._moved(there, kwargs) if isinstance(there, Recorder) else super().to(*args, **kwargs)

    async def _moved(self, there: Recorder, placements: Mapping[str, Placement]) -> DistTensor:
        cell = await moved(self.cell, self.recorder, there, _placed(self, there, placements))
        return handle(cell, there)

    def _no_value(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(_await_it(self))

    item = tolist = numpy = _no_value
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __array__ = _no_value

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self!r} stays in its process: pass on its `refs()`, or the value that `await` gives")


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DistTensor, target: Placements) -> Tensor:
        ctx.source = tensor.recorder.plain(tensor.cell.layout.spec.placements)
        return _redistributed(tensor, target)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: DistTensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        return _redistributed(gradient, ctx.source), None


def _redistributed(tensor: DistTensor, target: Placements) -> DistTensor:
    """Itself, if it is placed so: to autograd, another handle of its memory would be another tensor."""
    cell = tensor.recorder.redistributed(tensor.cell, target)
    return tensor if cell is tensor.cell else handle(cell, tensor.recorder)


class Drawing:
    def __init__(self, recorder: Recorder, like: Tensor) -> None:
        self._recorder = recorder
        self._like = like

    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype, *parameters: float) -> Tensor:
        placements = self._recorder.replicas
        if isinstance(self._like, DistTensor) and tuple(shape) == tuple(self._like.shape):
            placements = self._recorder.plain(self._like.cell.layout.spec.placements)
        return random(self._recorder, kind, shape, dtype, placements, *parameters)

    def fill(self, tensor: Tensor, kind: str, *parameters: float) -> Tensor:
        return tensor.copy_(self.draw(kind, tensor.shape, tensor.dtype, *parameters))


def random(
    recorder: Recorder, kind: str, shape: Sequence[int], dtype: torch.dtype, placements: Placements, *parameters: float
) -> DistTensor:
    spec = Spec(placements, Meta.of(torch.empty(tuple(shape), dtype=dtype, device="meta")))
    entry = recorder.entries.drawn(spec, kind, tuple(map(float, parameters)))
    return handle(recorder.record(entry, (), next_place())[0], recorder)


def handle(cell: Cell, recorder: Recorder) -> DistTensor:
    layout = cell.layout
    made: DistTensor = _make(DistTensor, layout.shape, strides=layout.stride, dtype=layout.dtype)
    made.cell = cell
    made.recorder = recorder
    return made


def _placed(tensor: Tensor, recorder: Recorder, placements: Mapping[str, Placement]) -> Placements:
    return checked(placed(placements, recorder.axes), tensor.dim())


def _await_it(tensor: object) -> str:
    return f"this line needs the value of {tensor!r}, which the workers have: await it first, as `(await x)`"


def _collect(value: Any, exact: bool, key: list[Any], cells: list[Cell], scalars: list[float]) -> bool:
    kind = type(value)
    if kind is DistTensor:
        key.append(value.cell.layout)
        cells.append(value.cell)
    elif kind is float and not exact:
        key.append(float)
        scalars.append(value)
    elif isinstance(value, list | tuple):
        key += (list, len(value))
        return all(_collect(one, exact, key, cells, scalars) for one in value)
    elif isinstance(value, dict):
        key += (dict, *value)
        return all(_collect(one, exact, key, cells, scalars) for one in value.values())
    elif isinstance(value, Tensor):
        # A subclass, such as a parameter, too.
        return False
    else:
        key += (kind, value)
    return True


def _first(
    recorder: Recorder,
    key: tuple[Any, ...],
    func: OpOverload[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    given = cast("list[DistTensor]", _tensors((args, kwargs)))
    if any(one.recorder is not recorder for one in given):
        raise ValueError(f"{func} takes tensors of several groups: move them to one, as `await x.to(workers)`")
    if torch.Tag.inplace_view in func.tags:
        return _view_in_place(func, args, kwargs)
    if any("Tensor" not in str(one.type) for one in func._schema.returns):
        raise RuntimeError(_await_it(given[0]))
    if is_random(func) and (random := drawn(Drawing(recorder, given[0]), func, args, kwargs)) is not None:
        return random
    exact = id(func) in _EXACT
    entry = None
    if exact or not (is_random(func) or any(one.name in ("p", "ord") for one in func._schema.arguments)):
        slots, scalars = count(), count()

        def plain(value: Any) -> Any:
            if type(value) is DistTensor:
                return Slot(next(slots))
            return value if exact or type(value) is not float else Scalar.of(value, next(scalars))

        plain_args, plain_kwargs = _mapped(plain, (args, dict(kwargs)))
        try:
            entry = recorder.entries.learn(key, func, plain_args, plain_kwargs, [one.cell.layout for one in given])
        except Exception as error:
            if type(error).__name__ not in ("DynamicOutputShapeException", "DataDependentOutputException"):
                raise
            raise RuntimeError(f"the shape that {func} gives depends on a value: {_await_it(given[0])}") from None
    if entry is None:
        # The values of its numbers belong to the key.
        _EXACT.add(id(func))
    return DistTensor.__torch_dispatch__(func, (), args, kwargs)


def _view_in_place(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    view = functional_of(func)
    assert view is not None, func
    args[0].cell = view(*args, **kwargs).cell
    return return_and_correct_aliasing(func, args, dict(kwargs), args[0])  # type: ignore[no-untyped-call]  # torch's


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        made = [_mapped(change, one) for one in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {name: _mapped(change, one) for name, one in value.items()}
    return change(value)


def _result(result: Any, outs: Sequence[Cell], recorder: Recorder, given: Any) -> Any:
    match result:
        case Given(position=position):
            return _tensors(given)[position]
        case int():
            return handle(outs[result], recorder)
        case list():
            return [_result(one, outs, recorder, given) for one in result]
        case tuple():
            return tuple(_result(one, outs, recorder, given) for one in result)
    return None


def _with_plain(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    recorder = _recorder((args, kwargs))
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(type(one) is not DistTensor for one in _tensors(given.get(argument.name))):
            raise TypeError(f"{func} writes a distributed tensor to a plain one: await it first, as `(await x)`")
    numbers = (torch.get_default_dtype(), torch.int64, torch.bool)
    takes_numbers = func is _FILL or (torch.Tag.pointwise in func.tags and func is not torch.ops.aten.where.self)

    def distributed(value: Any, *, is_argument: bool) -> Any:
        if not isinstance(value, Tensor) or type(value) is DistTensor:
            return value
        if value.dim() == 0 and value.dtype in numbers:
            return value.item() if is_argument and takes_numbers else _number(recorder, value)
        if value.nbytes > _MOST_BYTES:
            raise ValueError(
                f"{func} takes a plain tensor of {value.nbytes:,} bytes besides distributed ones: make it one of them "
                "with `workers.put(x)`, which sends it once"
            )
        return handle(recorder.put(value.clone(), recorder.replicas), recorder)

    def argument_of(value: Any) -> Any:
        return _mapped(partial(distributed, is_argument=isinstance(value, Tensor)), value)

    args = tuple(map(argument_of, args))
    kwargs = {name: argument_of(one) for name, one in kwargs.items()}
    if func is _FILL and not isinstance(args[1], Tensor):
        func = torch.ops.aten.fill_.Scalar
    return DistTensor.__torch_dispatch__(func, (), args, kwargs)


def _number(recorder: Recorder, value: Tensor) -> DistTensor:
    entry = recorder.entries.full(Spec(recorder.replicas, Meta.of(value)), "aten.full.default", Scalar.of(0, 0))
    return handle(recorder.record(entry, (), (value.item(),))[0], recorder)


def _recorder(given: Any) -> Recorder:
    return next(one.recorder for one in _tensors(given) if type(one) is DistTensor)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [found for one in value for found in _tensors(one)] if isinstance(value, list | tuple) else []


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
                tensor.register_hook(partial(_again, placements=placements))  # type: ignore[no-untyped-call]  # torch's
            made[id(one)] = tensor
        path, _, own = name.rpartition(".")
        setattr(modules[path], own, made[id(one)])
    for name, one in modules.items():
        one.register_forward_hook(partial(_output, wanted=first(strategy.outputs, name)))
    return module


def _again(value: Any, placements: Mapping[str, Placement]) -> Any:
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
            one.register_hook(partial(_again, placements=target))
        return one

    return tree_map(place, output)
