"""Operations of torch on fake tensors, recorded as operations on numbered tensors that never change."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aiodaft.tensor.instructions import Slot, mapped, slots_of
from aiodaft.tensor.operations import Cause, Gradient, Input, Mark, Operation, Phase, Role
from aiodaft.tensor.randoms import drawn
from aiodaft.tensor.scalars import LiveScalars, Number
from aiodaft.tensor.specs import Meta
from aiodaft.tensor.views import Op, Step, Traits, functional_of, traits_of, written_through

aten = torch.ops.aten
_get_sequence_nr: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]  # it is there

_ON_VALUES = (
    "the code needs the value of a tensor, or a shape that depends on one, and a capture has only shapes: write "
    "torch.where for a branch or a mask, return the tensor instead of its number, or make the value an argument"
)


class CaptureError(TypeError):
    """A step cannot be captured; the message begins with the line of the user's code."""


class _Memory:
    """The memory of a tensor and of its views; its value is the tensor `slot`, and each write makes another one."""

    __slots__ = ("given", "name", "own", "slot", "version")

    def __init__(self, slot: int, given: Input | None = None) -> None:
        self.slot = slot
        self.version = 0
        self.given = given
        self.own = given is not None
        """Whether no other memory has the same slot, so that an update may write in place."""


@dataclass(slots=True)
class _Value:
    """A tensor of the user's code: a memory seen through views. `slot` holds until the memory has another version."""

    memory: _Memory
    path: tuple[Step, ...]
    slot: int
    version: int


class Tracer(TorchDispatchMode):
    """Records while it is entered (with its `fake` mode below it).

    Attributes:
        operations: What was recorded. There are no writes, except in the phase `update`: these stay in place.
    """

    def __init__(
        self, fake: FakeTensorMode, before_backward: Callable[[], None], after_backward: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.fake = fake
        self._before_backward, self._after_backward = before_backward, after_backward
        self._in_backward = False
        self.operations: list[Operation | Mark | Gradient] = []
        self.inputs: list[Input] = []
        self.kept: list[tuple[Input, torch.Tensor]] = []
        """Inputs that the code may write to, with the tensors that stand for them."""
        self.metas: dict[int, Meta] = {}
        self.modules: list[str] = []
        self.updating = False
        self.zeros: set[int] = set()
        """Tensors that the code has set to zero."""
        self.scalars = LiveScalars()
        self._numbers = 0
        self._count = 0
        self._marking: tuple[str, Any, Mark | None] | None = None
        self._constants: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self._names: dict[int, str] = {}
        self._shared: set[int] = set()
        """Numbers, and the tensors of one element that they come from: each operation on these is done once."""
        self._done: dict[Any, tuple[int, ...]] = {}
        self._lines: dict[int, str] = {}
        self._causes: dict[int, tuple[str, str]] = {}
        self._had_backward = False
        self.draws = 0
        self._random: tuple[Number, Number] | None = None

    # inputs

    def input(
        self, tensor: torch.Tensor, name: str, role: Role, slot: int | None = None, keep: bool = True, **kwargs: Any
    ) -> FakeTensor:
        """A fake tensor for an input of the program; one with the `slot` of another input is the same input."""
        fake = self.like(tensor)
        if slot is None:
            slot = self._new(Meta.of(fake))
            self.inputs.append(Input(slot, name, role, **kwargs))
        given = next(one for one in reversed(self.inputs) if one.slot == slot)
        self._adopt(fake, _Memory(slot, given))
        if keep:
            self.kept.append((given, fake))
        return fake

    def number(self, name: str, value: float | None) -> Number:
        slot = self._new()
        self.inputs.append(Input(slot, name, "scalar"))
        self._names[slot] = name
        self._shared.add(slot)
        return Number(self, slot, value)

    def share(self, tensor: torch.Tensor) -> None:
        self._shared.add(self._value(tensor).slot)

    def like(self, tensor: torch.Tensor) -> FakeTensor:
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        with self.fake:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)  # type: ignore[return-value]  # made in the mode
            return empty.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]  # made in the mode

    # results

    def read(self, tensor: torch.Tensor) -> int:
        value = self._value(tensor)
        if value.version != value.memory.version:
            value.slot = self._walk(value)[-1]
            value.version = value.memory.version
        return value.slot

    def copied(self, slot: int) -> int:
        return self._record(aten.clone.default, (Slot(slot),), {}, [self.metas[slot]])[0]

    def memory(self, tensor: torch.Tensor) -> _Memory:
        return self._value(tensor).memory

    # marks

    def mark(self, tensor: torch.Tensor, module: str, side: str) -> torch.Tensor:
        self._marking = (module, side, None)
        marked: torch.Tensor = aten.alias.default(tensor)
        forward = self.operations[-1]
        if marked.requires_grad:
            hook = partial(self._mark_gradient, forward)
            marked.register_hook(hook)  # type: ignore[no-untyped-call]  # of torch
        return marked

    def _mark_gradient(self, forward: Any, gradient: torch.Tensor) -> torch.Tensor:
        self._marking = (forward.module, forward.side, forward)
        marked: torch.Tensor = aten.alias.default(gradient)
        return marked

    def gradient(self, parameter: str, tensor: torch.Tensor) -> Gradient:
        source = self.read(tensor)
        out = self._new(self.metas[source])
        line = self._lines.get(source) or self._line()
        cause = Cause("gradient", parameter.rpartition(".")[0], line, "backward")
        self.operations.append(one := Gradient(parameter, source, out, cause))
        self._adopt(tensor, _Memory(out))
        return one

    def begin_backward(self) -> None:
        if not self._in_backward:
            self._had_backward = self._in_backward = True
            self._before_backward()

    def end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._after_backward()

    # numbers

    def arithmetic(self, target: Op, *args: Number | float) -> Number:
        outs = self._record(
            target, tuple(Slot(x.slot) if isinstance(x, Number) else float(x) for x in args), {}, [None]
        )
        return Number(self, outs[0])

    def used(self) -> CaptureError:
        branch = "the optimizer branches on a number that each step has anew: a program cannot, use another one"
        return self.error(branch if self.updating else _ON_VALUES)

    def decided(self, number: Number, comparison: Callable[[Any, Any], bool], other: Any) -> bool:
        if number.value is None or isinstance(other, Number):
            raise self.used()
        outcome = comparison(number.value, other)
        self.scalars.guard(self._names[number.slot], comparison, other, outcome)
        return outcome

    # dispatch

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if torch._C._current_autograd_node() is None:
            self.end_backward()
        else:
            self.begin_backward()
        kwargs = kwargs or {}
        try:
            return self._dispatch(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise self.error(f"{_ON_VALUES} ({func})") from None

    def _dispatch(self, func: Op, args: Any, kwargs: Any) -> Any:
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func._opname.startswith("_foreach_"):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if handler := _HANDLERS.get(func):
            done, result = handler(self, func, args, kwargs)
            if done:
                return result
        traits = traits_of(func)
        if traits.random:
            with self:
                result = self._drawn(func, args, kwargs)
            if result is not None:
                return result
        args, kwargs = mapped(self._faked, (tuple(args), kwargs))
        plain, options = mapped(_plain, (args, kwargs))
        result = func(*plain, **options)
        if traits.written:
            return self._dispatch_write(func, traits, args, kwargs, result)
        if traits.viewed is not None:
            return self._dispatch_view(func, traits.viewed, args, kwargs, result)
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        metas = [Meta.of(one) if isinstance(one, torch.Tensor) else None for one in tensors]
        outs = self._record(func, *self._slots(args, kwargs), metas)
        for one, out in zip(tensors, outs, strict=True):
            if isinstance(one, torch.Tensor):
                self._adopt(one, _Memory(out)).own = self.updating and out not in self._shared
        return result

    def _drawn(self, func: Op, args: Any, kwargs: Any) -> Any:
        try:
            return drawn(self, func, args, kwargs)
        except NotImplementedError as error:
            raise self.error(str(error)) from None

    def _draw(self, kind: str, meta: Meta, parameters: Any) -> int:
        """The number of the next draw. The seed and the step are inputs, so that each step draws anew."""
        if self._random is None:
            self._random = self.number("random.seed", None), self.number("random.step", None)
        seed, step = (Slot(one.slot) for one in self._random)
        out = self._new(meta)
        arguments = (kind, list(meta.shape), meta.dtype, [float(one) for one in parameters], seed, step, self.draws)
        self._emit(torch.ops.aiodaft.random.default, arguments, {}, (out,))
        self.draws += 1
        return out

    def draw(self, kind: str, shape: Any, dtype: torch.dtype, *parameters: float) -> torch.Tensor:
        fake = self.like(torch.empty(shape, dtype=dtype, device="meta"))
        self._adopt(fake, _Memory(self._draw(kind, Meta.of(fake), parameters)))
        return fake

    def fill(self, tensor: torch.Tensor, kind: str, *parameters: float) -> torch.Tensor:
        drawn = self._draw(kind, Meta.of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")), parameters)
        self._write(self._value(tensor), drawn)
        return tensor

    def _dispatch_view(self, func: Op, viewed: int, args: Any, kwargs: Any, result: Any) -> Any:
        source = self._value(args[viewed])
        parent = self.metas[self.read(args[viewed])]
        several = isinstance(result, (tuple, list))
        metas = [Meta.of(one) for one in (result if several else (result,))]
        outs = self._record(func, *self._slots(args, kwargs), metas)
        for index, (one, out) in enumerate(zip(result if several else (result,), outs, strict=True)):
            step = Step(func, tuple(args[1:]), kwargs, index if several else None, parent)
            one.aiodaft = _Value(source.memory, (*source.path, step), out, source.memory.version)
        return result

    def _dispatch_write(self, func: Op, traits: Traits, args: Any, kwargs: Any, result: Any) -> Any:
        target = args[0] if traits.written == (0,) else kwargs.get("out")
        if traits.written not in ((0,), ("out",)) or not isinstance(target, torch.Tensor):
            raise self.error(f"{func} writes to several tensors; write it with operations that do not")
        value, meta = self._value(target), self.metas[self.read(target)]
        if target.shape != meta.shape:
            return self._dispatch_view_in_place(func, args, kwargs, target, meta)
        if self.updating and value.memory.own and not value.path and value.slot not in self._shared:
            outs = self._record(func, *self._slots(args, kwargs), [meta])
            self._write(value, outs[0])
            return result
        rest = {key: one for key, one in kwargs.items() if key != "out"}
        self._write(value, self._without_write(func, args, rest, target, meta))
        return result

    def _dispatch_view_in_place(self, func: Op, args: Any, kwargs: Any, target: torch.Tensor, meta: Meta) -> Any:
        """`squeeze_` and the like: the tensor is a view of what it was."""
        view = functional_of(func)
        if view is None or traits_of(view).viewed is None:
            raise self.error(f"{func} changes the shape of a tensor in place: write it with the form that does not")
        value = self._value(target)
        (out,) = self._record(view, *self._slots(args, kwargs), [Meta.of(target)])
        step = Step(view, tuple(args[1:]), kwargs, None, meta)
        vars(target)["aiodaft"] = _Value(value.memory, (*value.path, step), out, value.memory.version)
        return target

    def _without_write(self, func: Op, args: Any, kwargs: Any, target: torch.Tensor, meta: Meta) -> int:
        if func in (aten.zero_.default, aten.fill_.Scalar):
            (fill,) = args[1:] or (0,)
            fill = Slot(fill.slot) if isinstance(fill, Number) else fill
            out = self._record(aten.full_like.default, (Slot(self.read(target)), fill), {}, [meta])[0]
            if isinstance(fill, (int, float)) and not fill:
                self.zeros.add(out)
            return out
        if func is aten.copy_.default:
            return self._converted(self.read(args[1]), meta)
        functional = functional_of(func)
        if functional is None:
            raise self.error(f"{func} has no form that does not write: write it otherwise")
        plain, options = mapped(_plain, (args, kwargs))
        result = functional(*plain, **options)
        outs = self._record(functional, *self._slots(args, kwargs), [Meta.of(result)])
        return self._converted(outs[0], meta, copy=False)

    def _converted(self, slot: int, meta: Meta, *, copy: bool = True) -> int:
        now = self.metas[slot]
        if now.dtype != meta.dtype:
            slot = self._record(aten._to_copy.default, (Slot(slot),), {"dtype": meta.dtype}, [meta])[0]
            copy = False
        if now.shape != meta.shape:
            slot = self._record(aten.expand.default, (Slot(slot), list(meta.shape)), {}, [meta])[0]
            copy = True
        return self._record(aten.clone.default, (Slot(slot),), {}, [meta])[0] if copy else slot

    # values

    def _walk(self, value: _Value) -> list[int]:
        slots = [value.memory.slot]
        for at, step in enumerate(value.path):
            after = value.path[at + 1].parent if at + 1 < len(value.path) else self.metas[value.slot]
            outs = self._outs_of(step, after)
            self._emit(step.target, (Slot(slots[-1]), *step.args), step.kwargs, outs)
            slots.append(outs[step.at or 0])  # type: ignore[arg-type]  # only the one that is wanted has a number
        return slots

    def _outs_of(self, step: Step, meta: Meta) -> tuple[int | None, ...]:
        if step.at is None:
            return (self._new(meta),)
        return (*[None] * step.at, self._new(meta))

    def _write(self, value: _Value, slot: int) -> None:
        parents = self._walk(value)[:-1] if value.path else []
        written = slot
        for step, parent in zip(reversed(value.path), reversed(parents), strict=True):
            written = self._written_through(step, parent, written)
        value.memory.slot = written
        value.memory.version += 1
        value.slot, value.version = slot, value.memory.version

    def _written_through(self, step: Step, parent: int, child: int) -> int:
        undone = written_through(step, self.metas, parent, child)
        if undone is None:
            raise self.error(f"a write to a view made by {step.target} is not supported: clone it")
        target, args = undone
        return self._record(target, args, {}, [self.metas[parent]])[0]

    def _value(self, tensor: torch.Tensor) -> _Value:
        value: _Value | None = getattr(tensor, "aiodaft", None)
        if value is None:
            raise self.error("a tensor of another capture, or of torch itself, is used here")
        return value

    def _adopt(self, tensor: torch.Tensor, memory: _Memory) -> _Memory:
        vars(tensor)["aiodaft"] = _Value(memory, (), memory.slot, memory.version)
        return memory

    def _faked(self, value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._constant(value) if real else value

    def _constant(self, tensor: torch.Tensor) -> FakeTensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            raise self.error("a parameter of no model that is an argument is used: pass the model")
        if known := self._constants.get(id(tensor)):
            return known[1]
        with _disable_current_modes():
            value = tensor.detach().clone()
        fake = self.input(tensor, f"constant.{len(self._constants)}", "constant", value=value)
        self._constants[id(tensor)] = (tensor, fake)
        return fake

    def _slot(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Slot(self.read(value))
        return Slot(value.node.number.slot) if isinstance(value, torch.SymFloat) else value

    def _slots(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        slots: tuple[Any, Any] = mapped(self._slot, (args, kwargs))
        return slots

    # recording

    def _new(self, meta: Meta | None = None) -> int:
        self._count += 1
        if meta is not None:
            self.metas[self._count] = meta
        return self._count

    def _record(self, target: Op, args: Any, kwargs: Any, metas: Iterable[Meta | None]) -> tuple[int, ...]:
        """The numbers of the results of an operation; of one on numbers that was done before, those of then."""
        slots = slots_of((args, kwargs))
        shared = bool(slots) and self._shared.issuperset(slots)
        key = (target, args, tuple(kwargs.items())) if shared else None
        if key is not None and (known := self._done.get(key)):
            return known
        outs = tuple(self._new(meta) for meta in metas)
        if key is not None:
            self._shared.update(outs)
            self._done[key] = outs
        self._emit(target, args, kwargs, outs)
        return outs

    def _emit(self, target: Op, args: Any, kwargs: Any, outs: tuple[int | None, ...]) -> None:
        cause = self._cause(str(target))
        self._lines.update((out, cause.line) for out in outs if out is not None)
        self.operations.append(Operation(target, args, kwargs, outs, cause))

    def _cause(self, operation: str) -> Cause:
        node = torch._C._current_autograd_node()
        if node is not None and not self.modules:
            module, line = self._causes.get(node._sequence_nr(), ("", ""))
            return Cause(operation, module, line, "backward")
        module, line = self.modules[-1] if self.modules else "", self._line()
        self._causes.setdefault(_get_sequence_nr() - 1, (module, line))
        return Cause(operation, module, line, self._phase(node is not None))

    def _phase(self, inside_backward: bool) -> Phase:
        if self.updating:
            return "update"
        if inside_backward or _seeds_backward():
            return "backward"
        return "update" if self._had_backward and not torch.is_grad_enabled() and not self.modules else "forward"

    def error(self, message: str) -> CaptureError:
        return CaptureError(f"{self._line()}: {message}")

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if name := _user_file(frame.f_code.co_filename):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


_STDLIB = sysconfig.get_path("stdlib")
_INSIDE = tuple(os.path.dirname(one) + os.sep for one in (torch.__file__, os.path.dirname(__file__)))


@functools.cache
def _user_file(path: str) -> str:
    library = path.startswith(_STDLIB) and "site-packages" not in path
    return "" if library or path.startswith(("<", *_INSIDE)) else os.path.basename(path)


def _seeds_backward() -> bool:
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "_make_grads":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _plain(value: Any) -> Any:
    return 0.5 if isinstance(value, torch.SymFloat) else value


def _same(tracer: Tracer, func: Op, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`detach` and `alias`: the same tensor, or the one beyond a mark."""
    (tensor,) = args
    if not isinstance(tensor, FakeTensor):
        return True, tracer._constant(tensor)
    result = func(tensor)
    value = tracer._value(tensor)
    slot = tracer.read(tensor)
    if tracer._marking is not None:
        module, side, forward = tracer._marking
        tracer._marking = None
        source, slot = slot, tracer._new(tracer.metas[slot])
        if forward is None:
            cause = tracer._cause(f"{side} of {module}")
        else:
            cause = replace(forward.cause, operation=f"gradient of {forward.cause.operation}", phase="backward")
        mark = Mark(module, side, forward is not None, source, slot, cause, None if forward is None else forward.out)
        tracer.operations.append(mark)
    result.aiodaft = _Value(value.memory, value.path, slot, value.memory.version)
    return True, result


def _clone(tracer: Tracer, func: Op, args: Any, kwargs: Any) -> tuple[bool, Any]:
    source = tracer._faked(args[0])
    result = func(source, **kwargs)
    slot = tracer.read(source)
    if tracer.updating or result.stride() != source.stride() or tracer.memory(source).given is not None:
        return False, None
    tracer._adopt(result, _Memory(slot))
    return True, result


def _item(tracer: Tracer, func: Op, args: Any, kwargs: Any) -> tuple[bool, Any]:
    (tensor,) = args
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return True, func(constant)
    slot = tracer.read(tracer._faked(tensor))
    if not tracer.updating and slot not in tracer._shared:
        return False, None
    return True, Number(tracer, tracer._record(func, (Slot(slot),), {}, [None])[0])


def _batch_norm(tracer: Tracer, func: Op, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """The schema of batch norm is silent about its writes to the running mean and variance."""
    tensor, weight, bias, mean, variance, training, *rest = args
    if not training or mean is None:
        return False, None
    with tracer:
        functional = aten._native_batch_norm_legit_functional.default
        *results, new_mean, new_variance = functional(tensor, weight, bias, mean, variance, training, *rest)
        mean.copy_(new_mean)
        variance.copy_(new_variance)
    return True, tuple(results)


_HANDLERS: dict[Op, Callable[..., tuple[bool, Any]]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    aten._local_scalar_dense.default: _item,
    aten.native_batch_norm.default: _batch_norm,
}
