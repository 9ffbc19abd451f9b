"""The work of instructions and the memory that they take, by rank: from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from aiodaft.tensor.code import Routine
from aiodaft.tensor.instructions import Instruction, Slot, operation, slots_of
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Spec
from aiodaft.tensor.stage_runs import StagedRoutine, last_uses

T = TypeVar("T")

COLLECTIVES: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})

aten = torch.ops.aten
# Torch counts those of GPUs alone.
_FLOPS: Final = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


class Work(NamedTuple):
    """The work of an instruction at a rank: what it computes, and the bytes that it reads and writes."""

    flops: int
    nbytes: int
    dtype: str


def kinds_of(specs: Iterable[Spec], rules: Rules) -> tuple[int, ...]:
    """For each rank the first one that has parts of the same shapes; if all parts are even, 0."""
    uneven = [shapes for spec in set(specs) if len(set(shapes := rules.local_shapes(spec))) > 1]
    first: dict[tuple[Any, ...], int] = {}
    return tuple(first.setdefault(tuple(shapes[rank] for shapes in uneven), rank) for rank in range(rules.size))


def by_rank(kinds: Sequence[int], of: Callable[[int], T]) -> tuple[T, ...]:
    """What each rank has, computed once for each kind of ranks."""
    known = {rank: of(rank) for rank in dict.fromkeys(kinds)}
    return tuple(known[kind] for kind in kinds)


def flops_of(
    instructions: Sequence[Instruction], specs: Mapping[int, Spec], rules: Rules, kinds: Sequence[int]
) -> tuple[int, ...]:
    """Floating-point operations of matrix products, convolutions and attention, as torch's flop counter counts them."""
    counted = [one for one in instructions if _counter(one) is not None]
    return by_rank(kinds, lambda rank: sum(_flops(one, specs, rules, rank) for one in counted))


def work_of(one: Instruction, specs: Mapping[int, Spec], rules: Rules, rank: int) -> Work:
    """The work of an instruction that is no collective; views and numbers have none."""
    read = [number for number in slots_of((one.args, one.kwargs)) if number in specs]
    made = [out for out in one.outs if out is not None and out in specs]
    if not (read or made) or (_is_view(one) and not _writes(one)):
        return Work(0, 0, "")
    written = made or read[:1]
    nbytes = sum(rules.nbytes(specs[number], rank) for number in (*read, *written))
    flops = _flops(one, specs, rules, rank) if _counter(one) is not None else 0
    return Work(flops, nbytes, str(specs[(read or made)[0]].meta.dtype).removeprefix("torch."))


def _counter(one: Instruction) -> Callable[..., Any] | None:
    if one.kind != "op" or one.target is None:
        return None
    return counter_of(operation(one.target).overloadpacket)


def counter_of(packet: Any) -> Callable[..., Any] | None:
    """The function that counts the FLOPs of an operation, of its arguments and of `out_val`."""
    return flop_registry.get(_FLOPS.get(packet, packet))


def _flops(one: Instruction, specs: Mapping[int, Spec], rules: Rules, rank: int) -> int:
    def local(value: Any) -> Any:
        is_tensor = isinstance(value, Slot) and value.number in specs
        return _shaped(rules.local_shapes(specs[value.number])[rank]) if is_tensor else value

    args, kwargs = tree_map(local, (one.args, dict(one.kwargs)))
    made = [None if out is None else local(Slot(out)) for out in one.outs]
    count = _counter(one)
    return int(count(*args, **kwargs, out_val=made if len(made) > 1 else made[0])) if count is not None else 0


def _shaped(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _is_view(one: Instruction) -> bool:
    if one.kind in ("alias", "split"):
        return True
    return one.kind == "op" and one.target is not None and _returns_view(one.target)


def _writes(one: Instruction) -> bool:
    return one.kind == "op" and one.target is not None and operation(one.target)._schema.is_mutable


@cache
def _returns_view(target: str) -> bool:
    return any(one.alias_info is not None for one in operation(target)._schema.returns)


class Awaited:
    """The collectives that have begun, as `Code` waits for them: at the first use, or before a write."""

    def __init__(self) -> None:
        self._begun: dict[int, None] = {}

    def before(self, one: Instruction) -> list[int]:
        """The collectives, by their tensor, that an instruction waits for."""
        wanted = [*self._begun] if _writes(one) else slots_of((one.args, one.kwargs))
        return self._ended(wanted)

    def after(self, one: Instruction) -> None:
        if one.kind in COLLECTIVES:
            self._begun |= {out: None for out in one.outs if out is not None}

    def rest(self) -> list[int]:
        return self._ended([*self._begun])

    def _ended(self, wanted: Sequence[int]) -> list[int]:
        ended = [number for number in dict.fromkeys(wanted) if number in self._begun]
        for number in ended:
            del self._begun[number]
        return ended


@dataclass(eq=False, slots=True)
class _Storage:
    size: int
    refs: int = 0


class _Memory:
    """The storages at a rank while it runs a routine: those that `worker._Meter` measures."""

    def __init__(self, specs: Mapping[int, Spec], rules: Rules, rank: int) -> None:
        self._specs = specs
        self._rules = rules
        self._rank = rank
        self._now = 0
        self.most = 0

    def new(self, number: int, times: int = 1) -> _Storage:
        spec = self._specs.get(number)
        return self.held(_Storage(0 if spec is None else times * self._rules.nbytes(spec, self._rank)))

    def held(self, one: _Storage) -> _Storage:
        self._now += 0 if one.refs else one.size
        one.refs += 1
        return one

    def free(self, one: _Storage) -> None:
        one.refs -= 1
        self._now -= 0 if one.refs else one.size

    def run(
        self, routine: Routine, values: Sequence[_Storage], donated: Mapping[int, _Storage] | None = None
    ) -> list[_Storage]:
        """Run instructions on inputs, and give outputs, that are held once more for it."""
        here = dict(zip(routine.inputs, values, strict=True))
        table = dict(donated or {})
        last = {n: at for at, one in enumerate(routine.instructions) for n in _numbers_of(one)}
        last |= dict.fromkeys(routine.outputs, len(routine.instructions))
        for number in [number for number in here if number not in last]:
            self.free(here.pop(number))
        awaited = Awaited()
        for at, one in enumerate(routine.instructions):
            here |= {number: self.new(number) for number in awaited.before(one)}
            ending = [n for n in dict.fromkeys(_numbers_of(one)) if last[n] == at]
            if _writes(one) or not table.keys().isdisjoint(ending):
                while table:
                    self.free(table.popitem()[1])
            awaited.after(one)
            if one.kind not in COLLECTIVES:
                here |= self._made(one, here)
            self.most = max(self.most, self._now)
            for number in ending:
                if number in here:
                    self.free(here.pop(number))
        here |= {number: self.new(number) for number in awaited.rest()}
        outputs = [self.held(here[number]) for number in routine.outputs]
        for rest in here.values():
            self.free(rest)
        return outputs

    def _made(self, one: Instruction, here: Mapping[int, _Storage]) -> dict[int, _Storage]:
        outs = [out for out in one.outs if out is not None and out not in here]
        read = slots_of((one.args, one.kwargs))
        if read and (_is_view(one) or self._is_slice(one)):
            return {out: self.held(here[read[0]]) for out in outs}
        return {out: self.new(out) for out in outs}

    def _is_slice(self, one: Instruction) -> bool:
        """Whether a part of a tensor is contiguous inside of it, and thus in its memory."""
        if one.kind != "chunk":
            return False
        x, dim, *strided = one.args
        return not strided and math.prod(self._rules.local_shapes(self._specs[x.number])[self._rank][:dim]) == 1

    def run_stages(self, routine: StagedRoutine, state: Mapping[int, _Storage]) -> None:
        """Run tasks, and then updates, as `StageRuns` does."""
        given = {number: self.held(one) for number, one in state.items()}
        given |= {number: self.new(number) for number, *_ in routine.begins if number not in given}
        micro: list[dict[int, _Storage]] = [{} for _ in range(routine.microbatches)]
        sums: dict[int, _Storage] = {}
        ends = last_uses(routine)
        for stage, at, kind in routine.tasks:
            segment, here = routine.segments[stage, kind], micro[at]
            values = [
                self.held(here[n]) if n in here else self.held(given[n]) if n in given else self.new(n, len(micro))
                for n in segment.inputs
            ]
            for number in ends[stage, kind]:
                if number in here:
                    self.free(here.pop(number))
            for number, made in zip(segment.outputs, self.run(segment, values), strict=True):
                if number in routine.gradients:
                    self._add(sums, number, made)
                    continue
                if (kept := routine.carried.get(number)) is not None:
                    self.free(given[kept])
                    given[kept] = self.held(made)
                here[number] = made
        for number, total in sums.items():
            given[number] = self.new(number)
            self.free(total)
        for (_, kind), segment in routine.segments.items():
            if kind == "U":
                values = [self.held(given[n]) if n in given else self.new(n) for n in segment.inputs]
                self.run(segment, values)

    def _add(self, sums: dict[int, _Storage], number: int, made: _Storage) -> None:
        if number in sums:
            self.free(sums[number])
            self.free(made)
            made = self.new(number)
        sums[number] = made


def peak_of(
    routine: Routine | StagedRoutine, state: Iterable[int], specs: Mapping[int, Spec], rules: Rules, rank: int
) -> int:
    """The most bytes that a rank has at one time, the state included.

    Args:
        state: The numbers of the inputs that stay at the rank; those of `routine.donated` do until they are replaced.
        rank: Among those of a stage.
    """
    memory = _Memory(specs, rules, rank)
    kept = {number: memory.new(number) for number in state}
    if isinstance(routine, StagedRoutine):
        memory.run_stages(routine, kept)
    else:
        values = [memory.held(kept[n]) if n in kept else memory.new(n) for n in routine.inputs]
        memory.run(routine, values, {n: one for n, one in kept.items() if n in routine.donated})
    return memory.most


def _numbers_of(one: Instruction) -> Iterator[int]:
    yield from slots_of((one.args, one.kwargs))
    yield from (out for out in one.outs if out is not None)
