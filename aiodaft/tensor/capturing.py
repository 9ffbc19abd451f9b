"""A step of ordinary torch code as a program: it runs once, on tensors without data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map, tree_map_only

from aiodaft.tensor.instructions import Slot, slots_of
from aiodaft.tensor.lowering import quiet
from aiodaft.tensor.operations import Arguments, Gradient, Mark, Operation, Output, Results, Role
from aiodaft.tensor.program import Program
from aiodaft.tensor.randoms import numbered
from aiodaft.tensor.scalars import Items
from aiodaft.tensor.specs import Meta
from aiodaft.tensor.tracer import CaptureError, Tracer
from aiodaft.tensor.updates import Update
from aiodaft.tensor.views import source_of

aten = torch.ops.aten


def capture(fn: Callable[..., Any], *args: Any) -> Program:
    """The program of `fn(*args)`: its operations on whole tensors, with shapes and without data.

    Modules and optimizers among the arguments, at any depth, are left as they are: their parameters, buffers and
    states are inputs of the program, and so are the numbers of the optimizers' groups, read anew at each step. A module
    may be on the device "meta". All other tensors in the arguments are arguments of each step; what is no tensor is
    part of the program.

    Raises:
        CaptureError: The code needs the value of a tensor, or changes what a program cannot; the message has the line.
    """
    first = _Capture(fn, args, frozenset())
    program = first.run()
    if first.staying:
        program = _Capture(fn, args, first.staying).run()
    return replace(program, again=partial(_micro, fn, tree_map(partial(_rows, 1), args)))


def _micro(fn: Callable[..., Any], args: tuple[Any, ...], count: int) -> Program:
    return capture(fn, *tree_map(partial(_rows, count), args))


def _rows(count: int, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return (empty if count == 1 else empty[: len(leaf) // count]).requires_grad_(leaf.requires_grad)


class _Capture:
    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], accumulated: frozenset[str]) -> None:
        self.fn, self.args = fn, args
        self.accumulated = accumulated
        """Parameters whose gradients stay from step to step."""
        self.staying: frozenset[str] = frozenset()
        """Parameters whose gradients turned out to."""
        self.gradients: dict[str, tuple[Any, torch.Tensor]] = {}
        names = _names_of(fn, args)
        leaves = [
            (_path(name, keys), leaf)
            for name, arg in zip(names, args, strict=True)
            for keys, leaf in tree_flatten_with_path(arg)[0]
        ]
        self.models = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.nn.Module)]
        self.optimizers = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
        self.leaves = [one for one in leaves if not isinstance(one[1], _OWNERS)]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracer = Tracer(self.fake, self._drop_gradients, self._mark_gradients)
        self.fakes: dict[int, torch.Tensor] = {}
        """The fake tensor of each parameter, buffer and argument, by the id of the real one."""
        self.names: dict[int, str] = {}
        self.reals: dict[str, torch.Tensor] = {}
        self.unseen: set[str] = set()
        """Parameters whose gradients of an earlier step the code would have used."""
        self.aliases: dict[str, str] = {}
        self.pending: dict[str, Gradient] = {}
        self.superseded: dict[int, int] = {}

    def run(self) -> Program:
        with ExitStack() as stack:
            for name, model in self.models:
                stack.enter_context(self._with_model(model, name if len(self.models) > 1 else ""))
            owned = {one: (name, self.fakes[one]) for one, name in self.names.items()}
            for name, optimizer in self.optimizers:
                update = Update(name, optimizer, self.tracer, owned)
                stack.enter_context(update.entered(self._begin_update))
            self._name_arguments()
            names = iter([name for name, _ in self.leaves])
            args = [tree_map(partial(self._argument, names), arg) for arg in self.args]
            # A fake LSTM of oneDNN has no backward.
            stack.enter_context(quiet())
            enabled = torch._C._get_mkldnn_enabled()
            stack.callback(torch._C._set_mkldnn_enabled, enabled)
            torch._C._set_mkldnn_enabled(False)
            stack.enter_context(numbered(self.tracer))
            stack.enter_context(self.fake)
            stack.enter_context(self.tracer)
            stack.enter_context(Items(self.tracer))
            self._give_gradients()
            result = self.fn(*args)
            self.tracer.end_backward()
            self._keep_gradients()
            leaves, tree = tree_flatten(result)
            if odd := [type(one) for one in leaves if not isinstance(one, (torch.Tensor, *_PLAIN_VALUES))]:
                raise CaptureError(f"the result has a {odd[0].__name__}, which may hide tensors: return them alone")
            outputs = self._outputs(leaves)
        others = {at: one for at, one in enumerate(leaves) if not isinstance(one, torch.Tensor)}
        return self._program(outputs, Results(tree, others))

    # models

    @contextmanager
    def _with_model(self, model: torch.nn.Module, prefix: str) -> Generator[None]:
        if isinstance(model, torch.jit.ScriptModule):
            raise CaptureError("a scripted module cannot be captured: pass the nn.Module that it was made of")
        modules = dict(model.named_modules())
        first = {module: path for path, module in modules.items()}
        saved: list[tuple[Any, ...]] = [
            (one, dict(vars(one)), dict(one._parameters), dict(one._buffers)) for one in modules.values()
        ]
        hooks = []
        try:
            for path, module in modules.items():
                where = ".".join(filter(None, (prefix, path)))
                self._replace_tensors(module, where)
                hooks += self._hooks(module, where)
            for path, module in model.named_modules(remove_duplicate=False):
                for key in (*module._parameters, *module._buffers) if path != first[module] else ():
                    name, other = (".".join(filter(None, (prefix, at, key))) for at in (first[module], path))
                    self.aliases[other] = self.aliases.get(name, name)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, attributes, parameters, buffers in saved:
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
                module.__dict__.clear()
                module.__dict__.update(attributes)

    def _replace_tensors(self, module: torch.nn.Module, path: str) -> None:
        both: list[tuple[dict[str, Any], Role]] = [(module._parameters, "parameter"), (module._buffers, "buffer")]
        for owned, role in both:
            for key, tensor in owned.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                if id(tensor) in self.fakes:
                    self.aliases[name] = self.names[id(tensor)]
                else:
                    transient = role == "buffer" and key in module._non_persistent_buffers_set
                    value = tensor.detach().clone() if transient and tensor.device.type != "meta" else None
                    self.fakes[id(tensor)] = self.tracer.input(tensor, name, role, value=value)
                    self.names[id(tensor)], self.reals[name] = name, tensor
                owned[key] = self.fakes[id(tensor)]
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def _hooks(self, module: torch.nn.Module, path: str) -> list[Any]:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            self.tracer.modules.append(path)
            return self._marked((args, kwargs), path, "in")

        def leave(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            output = self._marked(output, path, "out")
            self.tracer.modules.pop()
            return output

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]

    def _marked(self, values: Any, path: str, side: str) -> Any:
        if not path:
            return values

        marked: dict[int, torch.Tensor] = {}

        def mark(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if id(value) not in marked:  # attention asks whether its query is its key
                marked[id(value)] = self.tracer.mark(value, path, side)
            return marked[id(value)]

        return tree_map(mark, values)

    # gradients

    def _begin_update(self) -> None:
        self.tracer.end_backward()
        self._drop_gradients()
        self.pending.clear()

    def _give_gradients(self) -> None:
        for given, parameter in list(self.tracer.kept):
            if given.role == "parameter" and parameter.requires_grad:
                name, real = f"grad/{given.name}", self.reals[given.name].grad
                first: dict[str, Any] = {"fill": 0.0} if real is None else {"value": real.detach().clone()}
                fake = self.tracer.input(parameter.detach(), name, "state", parameter=given.name, keep=False, **first)
                self.gradients[given.name] = self.tracer.memory(fake).given, fake
                parameter.grad = fake

    def _drop_gradients(self) -> None:
        """The first use of gradients: those that are zero, and those of which no other step is seen, are none."""
        for given, parameter in self.tracer.kept:
            fake = parameter.grad
            if given.role != "parameter" or fake is None or given.name in self.accumulated:
                continue
            if self.tracer.memory(fake).slot in self.tracer.zeros:
                parameter.grad = None
            elif given.name in self.gradients and fake is self.gradients[given.name][1]:
                parameter.grad = None
                self.unseen.add(given.name)

    def _keep_gradients(self) -> None:
        zeros = self.tracer.zeros
        there: dict[str, torch.Tensor] = {}
        for given, parameter in self.tracer.kept:
            fake = parameter.grad
            if given.role == "parameter" and fake is not None and self.tracer.read(fake) not in zeros:
                there[given.name] = fake
        self.staying = frozenset(there.keys() & self.unseen)
        if early := [name for name in self.unseen - self.staying if self.reals[name].grad is not None]:
            raise CaptureError(f"{early[0]} has a gradient from before the step: call zero_grad() before the capture")
        for name in self.accumulated:
            given, fake = self.gradients[name]
            self.tracer.kept.append((given, there.get(name, fake)))

    def _mark_gradients(self) -> None:
        """Mark the gradients after a backward pass; a further pass before the update takes the marks back."""
        for given, parameter in self.tracer.kept:
            if given.role != "parameter" or parameter.grad is None:
                continue
            mark = self.pending.get(given.name)
            slot = self.tracer.read(parameter.grad)
            if mark is None or slot != mark.out:
                if mark is not None:
                    self.superseded[mark.out] = mark.source
                self.pending[given.name] = self.tracer.gradient(given.name, parameter.grad)

    # arguments

    def _argument(self, names: Iterator[str], leaf: Any) -> Any:
        if isinstance(leaf, _OWNERS):
            return leaf
        name = next(names)
        if isinstance(leaf, torch.optim.lr_scheduler.LRScheduler):
            raise CaptureError(f"{name} is a scheduler: step it outside, after each step; programs read numbers anew")
        if id(leaf) in self.fakes:
            raise CaptureError(f"{name} is {self.names[id(leaf)]} of a model that is an argument: take it from there")
        return self.tracer.input(leaf, name, "argument") if isinstance(leaf, torch.Tensor) else leaf

    def _name_arguments(self) -> None:
        kinds = [{isinstance(leaf, _OWNERS) for leaf in tree_flatten(arg)[0]} for arg in self.args]
        if {True, False} in kinds:
            raise CaptureError("an argument has a model or an optimizer beside other values: pass it by itself")
        rest = [arg for arg, kind in zip(self.args, kinds, strict=True) if True not in kind]
        leaves, tree = tree_flatten(tuple(rest))
        self.arguments = Arguments(
            tree,
            tuple(
                (name, Meta.of(leaf), None) if isinstance(leaf, torch.Tensor) else (name, None, leaf)
                for (name, _), leaf in zip(self.leaves, leaves, strict=True)
            ),
        )

    # the program

    def _outputs(self, leaves: list[Any]) -> list[Output]:
        tracer = self.tracer
        results = [tracer.read(one) for one in leaves if isinstance(one, torch.Tensor)]
        roots = _roots(tracer.operations)
        owned = {given.slot for given, _ in self.tracer.kept if given.role != "argument"}
        outputs: list[Output] = []
        seen: dict[str, int] = {}
        for given, fake in self.tracer.kept:
            slot = tracer.read(fake)
            if slot == given.slot:
                continue
            if given.role == "argument":
                raise CaptureError(f"the step writes to its argument {given.name}: clone it first")
            if given.name in seen:
                if seen[given.name] != slot:
                    raise CaptureError(f"parameters of a group of the optimizer count their steps apart: {given.name}")
                continue
            seen[given.name] = slot
            root = roots.get(slot, slot)
            if root != given.slot:
                slot = tracer.copied(slot) if root in owned else slot
                owned.add(root)
            outputs.append(Output(slot, given.name, given.role))
        results = [tracer.copied(slot) if roots.get(slot, slot) in owned else slot for slot in results]
        return [*(Output(slot, "", "result") for slot in results), *outputs]

    def _program(self, outputs: list[Output], results: Results) -> Program:
        operations = _needed(_without_marks(self.tracer.operations, self.superseded), {one.slot for one in outputs})
        used = {slot for one in operations for slot in _sources(one)} | {one.slot for one in outputs}
        inputs = [
            one for one in self.tracer.inputs if one.slot in used or one.role in ("parameter", "buffer", "argument")
        ]
        made = {one.slot for one in inputs} | {out for one in operations for out in _outs(one) if out is not None}
        return Program(
            inputs=tuple(inputs),
            operations=tuple(
                replace(one, forward=None) if isinstance(one, Mark) and one.forward not in made else one
                for one in operations
            ),
            outputs=tuple(outputs),
            metas={slot: meta for slot, meta in self.tracer.metas.items() if slot in made},
            arguments=self.arguments,
            results=results,
            scalars=self.tracer.scalars,
            aliases=self.aliases,
        )


_OWNERS = (torch.nn.Module, torch.optim.Optimizer)
_PLAIN_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _names_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    names: list[str] = []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}.{at}" for at in range(len(args) - len(names))]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    if len(names) < len(args):
        raise TypeError(f"{fn} takes {len(names)} arguments, and there are {len(args)}")
    return names[: len(args)]


def _path(name: str, keys: Any) -> str:
    return ".".join([name, *(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)])


def _sources(one: Operation | Mark | Gradient) -> list[int]:
    return slots_of((one.args, one.kwargs)) if isinstance(one, Operation) else [one.source]


def _roots(operations: list[Any]) -> dict[int, int]:
    roots: dict[int, int] = {}
    for one in operations:
        source = source_of(one.target, one.args, one.kwargs) if isinstance(one, Operation) else one.source
        if source is not None:
            roots.update((out, roots.get(source, source)) for out in _outs(one) if out is not None)
    return roots


def _outs(one: Operation | Mark | Gradient) -> tuple[int | None, ...]:
    return one.outs if isinstance(one, Operation) else (one.out,)


def _needed(operations: list[Any], wanted: set[int]) -> list[Any]:
    needed = []
    for one in reversed(operations):
        if not wanted.isdisjoint(_outs(one)):
            wanted.update(_sources(one))
            needed.append(one)
    return needed[::-1]


def _without_marks(operations: list[Any], superseded: Mapping[int, int]) -> list[Any]:
    def source(value: Any) -> Any:
        if isinstance(value, Slot):
            return Slot(source(value.number))
        while value in superseded:
            value = superseded[value]
        return value

    if not superseded:
        return operations
    rest = []
    for one in operations:
        if not isinstance(one, Operation):
            if one.out not in superseded:
                rest.append(replace(one, source=source(one.source)))
        elif superseded.keys().isdisjoint(slots_of((one.args, one.kwargs))):
            rest.append(one)
        else:
            args, kwargs = tree_map_only(Slot, source, (one.args, dict(one.kwargs)))
            rest.append(replace(one, args=args, kwargs=kwargs))
    return rest
