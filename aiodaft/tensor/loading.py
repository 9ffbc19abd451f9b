"""Groups of workers that run plans: the controller's side."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from collections.abc import Awaitable, Container, Generator, Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from aiodaft.checkpoint import Saved
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.group import Group
from aiodaft.placement import Spawned, Spawner
from aiodaft.ref import Ref, Refs
from aiodaft.resharding import Layout, Sharded, reshard
from aiodaft.tensor.handles import DistTensor, ModuleT, distribute, handle, random
from aiodaft.tensor.operations import Input
from aiodaft.tensor.plan import Plan, routine_of
from aiodaft.tensor.recorder import Recorder, values_of
from aiodaft.tensor.specs import Meta, Placements, Spec, checked, cut, holders, joined, placed
from aiodaft.tensor.strategy import Strategy
from aiodaft.tensor.transfers import RANDOM, adopted, layout_once, saved_numbers, sharding_of
from aiodaft.tensor.worker import SEED, STEP, Counted, Filled, Measure, Order, Program, Progress, Worker


def workers(
    spawner: Spawner, axes: Mapping[str, int], cls: type[Worker] = Worker, *args: Any, **options: Any
) -> Spawned[Workers]:
    """Make a group of workers: `async with tensor.workers(rt, {"dp": 2, "tp": 2}) as workers`.

    A death of a worker fails the steps that need it, and is not reported to the scope; see `Workers.heal`.

    Args:
        spawner: The runtime or scope that owns them.
        axes: Names and sizes of the axes, such as `plan.axes`.
        cls: The class, which may have methods of yours.
        args: The arguments of its constructor.
        options: As for `on`: `cpus=2`, `spread=True`, ...

    Raises:
        TypeError, ValueError: The class is no class of workers, or there is no axis.
        Exception: As `group`.
    """
    if not issubclass(cls, Worker):
        raise TypeError(f"{cls.__name__} is no class of workers: extend aiodaft.tensor.Worker")
    if not axes:
        raise ValueError("workers have named axes, such as {'dp': 2, 'tp': 2}: give at least one")
    placement = spawner.on(**{"restart": "temporary", **options})
    spawned: Spawned[Group[Worker]] = placement.group(math.prod(axes.values()), cls, *args, axes=dict(axes))

    async def start() -> Workers:
        return Workers(await spawned)

    return Spawned(f"workers({cls.__name__})", start, lambda made, graceful: spawned._end(made.group, graceful))


class Workers:
    """A group of workers with named axes.

    Attributes:
        group: The group, for calls of your own methods.
    """

    def __init__(self, group: Group[Any]) -> None:
        if not group.axes:
            raise ValueError(f"{group!r} has no axes: make it with axes, such as axes={{'tp': {len(group)}}}")
        self.group = group
        self._numbers = count()
        self._names = count()
        self._recorder: Recorder | None = None
        self._begin_session()

    @property
    def axes(self) -> Mapping[str, int]:
        """The names and sizes of the axes."""
        return self.group.axes

    async def load(
        self,
        plan: Plan,
        state: Mapping[str, Tensor] | Step | str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        compile: bool = False,  # noqa: A002 - the word of torch
    ) -> Step:
        """Send a plan and its state to the workers, each its part; returns the step, which is then one message to each.

        Args:
            plan: A plan for the axes of this group.
            state: Whole tensors by name: parameters and buffers, as `model.state_dict()` gives them, and states of the
                optimizer, which otherwise are as at its beginning. Also what `Step.state()` gives, of a step with any
                plan of the same program. Other names are ignored. Or a step, also of other workers and with any plan:
                each rank gets its parts from the workers that have them, and nothing passes the controller. Or the path
                of a checkpoint, of which each rank reads its parts; see `aiodaft.checkpoint`.
            seed: The seed of the random numbers of all steps, unless `state` is of a step.
            compile: Whether the operations between collectives are given to torch.compile, at the first step. What it
                cannot compile runs as it is written; `Step.usage` has the reason.

        Raises:
            ValueError, TypeError: The plan is for other axes, or a tensor is missing or has another shape or dtype.
            ActorDied: A worker is dead; see `heal`.

        Cancellation: nothing is loaded.
        """
        if list(plan.axes.items()) != list(self.axes.items()):
            raise ValueError(f"the plan is for axes {dict(plan.axes)}, and the workers have {dict(self.axes)}")
        inputs = [one for one in plan.inputs if one.role not in _PER_STEP]
        await self._refresh()
        random, given = {SEED: seed, STEP: 0}, dict[str, Tensor]()
        moved: Mapping[int, Any] = {}
        source = await Saved.at(state, self.group) if isinstance(state, str | os.PathLike) else state
        if isinstance(source, Step):
            random, moved = await source._random_now(), source._same(inputs, plan)
        elif isinstance(source, Saved):
            random |= await saved_numbers(source)
            moved = {one.slot: name for one in inputs if (name := _name_in(source.places, one, plan)) is not None}
            for one in inputs:
                if one.slot in moved:
                    place = source.places[moved[one.slot]]
                    _check_fits(one.name, place.shape, getattr(torch, place.dtype), plan.specs[one.slot].meta)
        elif source is not None:
            if not isinstance(source, Mapping):
                raise TypeError(
                    f"state is a {type(source).__name__}: give tensors by name, as model.state_dict(), a step or a path"
                )
            given = dict(source)
            random |= {name: int(given[name]) for name in RANDOM if name in given}
        values = {one.slot: _first_value(one, plan, given) for one in inputs if one.slot not in moved}
        numbers = [(one, next(self._numbers)) for one in inputs]
        step = Step(self, plan, f"{self._session}/{next(self._names)}", numbers, random)

        parts: list[dict[int, Tensor | Filled]] = [{} for _ in self.group]
        for one, number in step._state:
            for at, rank in enumerate(plan.ranks_of(one.stage) if one.slot in values else ()):
                parts[rank][number] = _part(values[one.slot], plan, one.slot, at)
        if moved:
            await step._take_over(source, moved)
        await values_of([
            *self.group.each(Worker.put, parts, self._session),
            *self.group.each(Worker.load, step._programs(compile), self._session, step.name),
        ])
        return step

    def put(self, tensor: Tensor, **placements: Placement) -> DistTensor:
        """Send a tensor to the workers, to each its part; an axis that is not named gets replicas.

        Raises:
            ValueError: There is no such axis, or no such dimension.
        """
        return handle(self.recorder.put(tensor, self._placed(tensor.dim(), placements)), self.recorder)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype | None = None, **placements: Placement) -> DistTensor:
        """A tensor of zeros, made at the workers. Raises as `put`."""
        return self._made(shape, dtype, placements, "aten.zeros.default")

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None, **placements: Placement) -> DistTensor:
        """A tensor of any values, made at the workers. Raises as `put`."""
        return self._made(shape, dtype, placements, "aten.empty.memory_format")

    def randn(self, shape: Sequence[int], dtype: torch.dtype | None = None, **placements: Placement) -> DistTensor:
        """A tensor of normal random numbers, drawn at the workers; the same ones for all placements. Raises as `put`.

        They follow `torch.manual_seed`; in `tensor.manual_seed(seed, step)` they are those that one process draws.
        """
        placed = self._placed(len(tuple(shape)), placements)
        return random(self.recorder, "normal", shape, dtype or torch.get_default_dtype(), placed, 0.0, 1.0)

    async def of(self, refs: Iterable[Ref[Tensor]], **placements: Placement) -> DistTensor:
        """The results of a method as the parts of a tensor, one of each rank, where they are.

            x = await workers.of(workers.group.all(Loader.rows), dp=Shard(0))

        Raises:
            TypeError, ValueError: A result is no tensor, or the parts make no whole.
            Exception: The error of a call.

        Cancellation: the tensor is not there; nothing else changes.
        """
        recorder = self.recorder
        return handle(await adopted(recorder, refs, placed(placements, recorder.axes)), recorder)

    def distribute(self, module: ModuleT, strategy: Strategy) -> ModuleT:
        """Replace the parameters and buffers of a module by distributed tensors, in place; returns the module.

        Of the strategy this takes `params` (gradients arrive likewise) and `outputs`; the rest is for plans.

        Raises:
            ValueError: A pattern fits no name, or a parameter has no data.
        """
        return distribute(self.put, module, strategy)

    @property
    def recorder(self) -> Recorder:
        """Records the operations on handles. Those of an earlier epoch of the group are lost with it."""
        if self._recorder is None or self._recorder.epoch != self.group.epoch:
            self._recorder = Recorder(self.group, self.axes)
        return self._recorder

    def _made(
        self, shape: Sequence[int], dtype: torch.dtype | None, placements: Mapping[str, Placement], name: str
    ) -> DistTensor:
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        spec = Spec(self._placed(like.dim(), placements), Meta.of(like))
        recorder = self.recorder
        return handle(recorder.record(recorder.entries.full(spec, name), ())[0], recorder)

    def _placed(self, dims: int, placements: Mapping[str, Placement]) -> Placements:
        return checked(placed(placements, self.axes), dims)

    async def heal(self) -> list[int]:
        """Replace the workers that are gone by new ones, and return their ranks; then `load` a state again.

        Raises:
            Exception: As `Group.heal`.
        """
        gone = await self.group.heal(len(self.group))
        await self._refresh()
        return gone

    def __repr__(self) -> str:
        return f"<Workers {self.group.id}: {', '.join(f'{axis}={size}' for axis, size in self.axes.items())}>"

    def _begin_session(self) -> None:
        self._session = uuid4().hex
        self._epoch = self.group.epoch
        self._attempt = 0
        # Names of steps that nothing refers to any more.
        self._gone: list[str] = []

    async def _refresh(self) -> None:
        """Begin anew with the members of a new epoch; have workers forget steps that are gone."""
        if self.group.epoch != self._epoch:
            before = self._session
            self._begin_session()
            await values_of(self.group.all(Worker.end, before))
        if self._gone:
            gone, self._gone = self._gone, []
            await values_of(self.group.all(Worker.unload, self._session, gone))

    def _failed(self, attempt: int) -> None:
        """The runs of an attempt have failed: the next ones have collectives of their own."""
        if attempt == self._attempt:
            self._attempt += 1


class Step:
    """A plan that the workers have, with its state: `loss = await step(x, y)`.

    Attributes:
        plan: The plan.
        name: Its name at the workers; see `Worker.state`.
    """

    def __init__(
        self,
        workers: Workers,
        plan: Plan,
        name: str,
        state: Sequence[tuple[Input, int]],
        random: Mapping[str, int],
    ) -> None:
        self.plan = plan
        self.name = name
        self._workers = workers
        self._state = tuple(state)
        self._ranks = {stage: plan.ranks_of(stage) for stage in plan.stages}
        self._numbers = {one.name: (number, one.stage) for one, number in state}
        self._arguments = [one for one in plan.inputs if one.role == "argument"]
        self._scalars = [one for one in plan.inputs if one.role == "scalar" and one.name != STEP]
        self._counting = [one for one in plan.inputs if one.name == STEP and one.role == "scalar"]
        self._session = workers._session
        # The seed, and the number of the first step: random numbers depend on these and on the place in the program.
        self._random = random
        self._unusable = ""
        self._unload = weakref.finalize(self, workers._gone.append, name)

    def __call__(self, *args: Any) -> Run:
        """Run the step, with arguments as those of the captured function: whole tensors.

        It begins at once, after the steps before it: several may be under way. Scalars of the optimizer are read now.

        Returns:
            An awaitable of the results of the function.

        Raises:
            ValueError, TypeError: An argument differs in structure, shape or dtype from the captured one; it is named.
            RuntimeError: The state is unusable, since a step has failed, or the group has changed: load it again.
        """
        refs, attempt = self._begin(Worker.run, args)
        return Run(self, refs, attempt)

    async def measure(self, *args: Any) -> list[Measure]:
        """Run the step as a call does, slowly; returns the most memory that it took, by rank."""
        refs, attempt = self._begin(Worker.measure, args)
        return [measure for _, measure in await self._finish(refs, attempt)]

    async def usage(self) -> list[Progress]:
        """The steps that were done, their collectives and the bytes that were received, by rank."""
        self._check()
        return await values_of(self._workers.group.all(Worker.progress, self._session, self.name))

    async def state(self) -> dict[str, Tensor]:
        """The whole parameters, buffers and states of the optimizer, by name, after the steps that have begun.

        Raises:
            RuntimeError: As a call.
            ActorDied: A worker is dead.

        Cancellation: nothing changes.
        """
        self._check()
        plan, size = self.plan, len(self._workers.group)
        wanted: list[list[int]] = [[] for _ in range(size)]
        kept = [(one, number) for one, number in self._state if one.role != "constant"]
        for one, number in kept:
            ranks = self._ranks[one.stage]
            for at in holders(plan.specs[one.slot].placements, plan.inner):
                wanted[ranks[at]].append(number)
        refs = self._workers.group.each(Worker.get, wanted, self._session)
        counted = self._workers.group[0].progress(self._session, self.name)
        *parts, progress = await values_of([*refs, counted])
        by_number: dict[int, dict[int, Tensor]] = {number: {} for _, number in kept}
        inner = {rank: at for one, _ in kept for at, rank in enumerate(self._ranks[one.stage])}
        for rank, (numbers, given) in enumerate(zip(wanted, parts, strict=True)):
            for number, part in zip(numbers, given, strict=True):
                by_number[number][inner[rank]] = part
        whole = {}
        for one, number in kept:
            spec = plan.specs[one.slot]
            whole[one.name] = joined(by_number[number], spec.meta.shape, spec.placements, plan.inner)
        whole |= {alias: whole[name] for alias, name in plan.aliases.items() if name in whole}
        if self._counting:
            done = progress.done
            whole |= {SEED: torch.tensor(self._random[SEED]), STEP: torch.tensor(self._random[STEP] + done)}
        return whole

    def refs(self, name: str) -> Refs[Tensor]:
        """The parts of a parameter, a buffer or a state of the optimizer, by rank, where they are.

        Raises:
            KeyError: There is none of this name.
            RuntimeError: As a call.
        """
        self._check()
        if name not in self._numbers:
            raise KeyError(f"the state has no {name!r}: it has {', '.join(self._numbers)}")
        number, stage = self._numbers[name]
        members = self._workers.group
        return Refs([members[rank].part(self._session, number) for rank in self._ranks[stage]])

    def sharded(self) -> Sharded:
        """The state after the steps that have begun, in shards: for `aiodaft.checkpoint` and `aiodaft.resharding`.

        The workers copy it while they run the next step, which waits for the copies before it changes the state. Each
        part is there once. The random numbers go on from it, too.

        Raises:
            RuntimeError: As a call.
        """
        self._check()
        kept = {one.name: (one, number) for one, number in self._state if one.role != "constant"}
        layout = layout_once(self.plan, kept, RANDOM if self._counting else ())
        numbers = [
            {name: number for name, (_, number) in kept.items() if layout.part(name, rank) is not None}
            for rank in range(layout.size)
        ]
        counted = Counted(self.name, self._random[SEED], self._random[STEP]) if self._counting else None
        members, session, key = self._workers.group, self._session, uuid4().hex
        begun = members.each(Worker.begin_copy, numbers, session, key, counted)
        for ref in begun:
            # `copied` has this error, too.
            ref.add_done_callback(Ref.exception)
        return Sharded(members.each(Worker.copied, begun, session, key), layout)

    def _same(self, inputs: Sequence[Input], plan: Plan) -> dict[int, tuple[Input, int]]:
        here = {
            (one.name, one.role, self.plan.specs[one.slot].meta.shape): (one, number) for one, number in self._state
        }
        found = {
            one.slot: here.get((one.name, one.role, plan.specs[one.slot].meta.shape))
            for one in inputs
            if one.role != "constant"
        }
        return {slot: one for slot, one in found.items() if one is not None}

    async def _random_now(self) -> dict[str, int]:
        self._check()
        done = (await self._workers.group[0].progress(self._session, self.name)).done
        return {SEED: self._random[SEED], STEP: self._random[STEP] + done}

    async def _take_over(self, source: Any, moved: Mapping[int, Any]) -> None:
        """Take tensors of another step, or of a checkpoint; `moved` has their names there by slot."""
        there = {str(one.slot): (one, number) for one, number in self._state if one.slot in moved}
        found = {name: moved[one.slot] for name, (one, _) in there.items()}
        members, layout = self._workers.group, _layout(self.plan, there)
        if isinstance(source, Step):
            given = source._workers.group.each(Worker.give, _by_rank(source.plan, found), source._session)
            parts = await reshard(_layout(source.plan, found), layout).move(given, to=members)
        else:
            parts = await source.load(layout, names=found)
        numbers = _by_rank(self.plan, there)
        await values_of([members[rank].take(part, numbers[rank], self._session) for rank, part in enumerate(parts)])

    async def unload(self) -> None:
        """Free the memory of the state at the workers. Idempotent; it happens as well once nothing refers to the step.

        Raises:
            ActorDied: A worker is dead.
        """
        self._unload()
        self._unusable = self._unusable or "it was unloaded"
        await self._workers._refresh()

    def __repr__(self) -> str:
        return f"<Step of {self._workers!r}, {len(self.plan.instructions)} instructions>"

    def _check(self) -> None:
        if self._session != self._workers._session or self._workers.group.epoch != self._workers._epoch:
            raise RuntimeError("the workers have changed since this step was loaded: load it again, with a state")
        if self._unusable:
            raise RuntimeError(f"the state of this step is unusable: {self._unusable}. Load it again, with a state")

    def _begin(self, method: Any, args: Any) -> tuple[Refs[Any], int]:
        self._check()
        plan, workers = self.plan, self._workers
        given = plan.arguments.bind(*args)
        known = {**plan.scalars, **self._random}

        values: list[list[Any]] = [[] for _ in workers.group]
        for one in self._arguments:
            for at, rank in enumerate(self._ranks[one.stage]):
                values[rank].append(_argument(given[one.name], plan, one.slot, at))
        for one in self._scalars:
            for rank in self._ranks[one.stage]:
                values[rank].append(known[one.name])
        orders = [Order(self._session, workers._attempt, self.name, here) for here in values]
        return workers.group.each(method, orders), workers._attempt

    async def _finish(self, refs: Refs[Any], attempt: int) -> list[Any]:
        try:
            return await values_of(refs)
        except asyncio.CancelledError:
            self._workers._failed(attempt)
            self._unusable = "a step was cancelled"
            raise
        except Exception as error:
            self._workers._failed(attempt)
            if await self._is_whole(error):
                error.add_note("the state is as it was before this step; the next one may follow")
            else:
                self._unusable = f"a step has failed with {type(error).__name__}: {error}"
                error.add_note("the state is unusable: load it again")
            raise

    async def _is_whole(self, error: Exception) -> bool:
        if isinstance(error, OutcomeUnknown):
            return False
        try:
            told = await values_of(self._workers.group.all(Worker.progress, self._session, self.name))
        except DaftError:
            return False
        return not any(one.changing for one in told) and len({one.done for one in told}) == 1

    def _programs(self, compiled: bool) -> list[Program]:
        ranks = self._ranks
        known: dict[frozenset[tuple[int, bool]], Program] = {}
        result = []
        for rank in range(self.plan.size):
            # The stages that it has, and whether it gives the results of each.
            here = frozenset((stage, of[0] == rank) for stage, of in ranks.items() if rank in of)
            if here not in known:
                known[here] = self._program(dict(here))._replace(compiled=compiled)
            result.append(known[here])
        return result

    def _program(self, gives: Mapping[int, bool]) -> Program:
        plan = self.plan
        state = [(one, number) for one, number in self._state if one.stage in gives]
        later = (*self._counting, *self._arguments, *self._scalars)
        inputs = [*(one for one, _ in state), *(one for one in later if one.stage in gives)]
        outputs = [one for one in plan.outputs if one.stage in gives]
        numbers: dict[tuple[str, str, int], int] = {(one.name, one.role, one.stage): number for one, number in state}
        return Program(
            routine_of(plan, self.name, inputs, outputs, min(gives)),
            state=tuple(number for _, number in state),
            names=tuple(one.name for one, _ in state),
            outs=tuple(numbers.get((one.name, one.role, one.stage)) for one in outputs),
            returns=tuple(at for at, one in enumerate(outputs) if one.role == "result" and gives[one.stage]),
            first=self._random[STEP] if any(one.stage in gives for one in self._counting) else None,
            numbers=tuple(one.slot for one in (*self._counting, *self._scalars)),
            parameters=frozenset(one.slot for one, _ in state if one.role == "parameter"),
        )

    def _results(self, by_rank: Sequence[Sequence[Any]]) -> Any:
        rest = [iter(one) for one in by_rank]
        outputs = [one for one in self.plan.outputs if one.role == "result"]
        return self.plan.results.build([next(rest[self._ranks[one.stage][0]]) for one in outputs])


class Run(Awaitable[Any]):
    """A step that has begun. Await it for its results.

    If it fails, the error says whether the state is as before: if no worker has begun its updates. Else it is unusable
    until it is loaded again.

    Raises:
        ActorDied: A worker has died.
        Exception: That of an operation, with a note of its place in your code, and with the frames of the worker.

    Cancellation: the workers end it, and the state is unusable.
    """

    def __init__(self, step: Step, refs: Refs[Any], attempt: int) -> None:
        self._step = step
        self._refs = refs
        self._attempt = attempt

    def __await__(self) -> Generator[Any, None, Any]:
        return self._results().__await__()

    async def _results(self) -> Any:
        by_rank = await self._step._finish(self._refs, self._attempt)
        return self._step._results(by_rank)


# The roles of inputs that come anew with each step.
_PER_STEP = frozenset({"argument", "scalar"})


def _first_value(one: Input, plan: Plan, state: Mapping[str, Tensor]) -> Tensor | Filled:
    meta = plan.specs[one.slot].meta
    name = _name_in(state, one, plan)
    if name is not None:
        given = state[name]
        if not isinstance(given, Tensor):
            raise TypeError(f"state[{one.name!r}] is a {type(given).__name__}: give a tensor")
        _check_fits(one.name, tuple(given.shape), given.dtype, meta)
        if given.is_meta:
            raise ValueError(f"state[{one.name!r}] is on the device meta, without data: give its values")
        return given.detach()
    if one.value is not None:
        return one.value
    if one.role == "state":
        return Filled(meta.shape, meta.dtype, one.fill or 0)
    raise ValueError(f"state has no {one.role} {one.name!r}: give state=model.state_dict() or that of another step")


def _check_fits(name: str, shape: tuple[int, ...], dtype: torch.dtype, meta: Meta) -> None:
    if shape != meta.shape or dtype != meta.dtype:
        raise ValueError(
            f"state[{name!r}] is {dtype} {shape}, and the program was captured with {meta.dtype} {meta.shape}"
        )


def _layout(plan: Plan, tensors: Mapping[str, tuple[Input, int]]) -> Layout:
    return Layout(
        plan.axes,
        {
            name: sharding_of(plan.specs[one.slot], plan.inner, plan.place_of(one.stage))
            for name, (one, _) in tensors.items()
        },
    )


def _name_in(places: Container[str], one: Input, plan: Plan) -> str | None:
    return None if one.role == "constant" else next((name for name in _names(one, plan) if name in places), None)


def _names(one: Input, plan: Plan) -> list[str]:
    return [one.name, *(alias for alias, name in plan.aliases.items() if name == one.name)]


def _by_rank(plan: Plan, tensors: Mapping[str, tuple[Input, int]]) -> list[dict[str, int]]:
    result: list[dict[str, int]] = [{} for _ in range(plan.size)]
    for name, (one, number) in tensors.items():
        for rank in plan.ranks_of(one.stage):
            result[rank][name] = number
    return result


def _part(value: Tensor | Filled, plan: Plan, slot: int, rank: int) -> Any:
    spec = plan.specs[slot]
    if isinstance(value, Filled):
        shape = cut(torch.empty(value.shape, device="meta"), spec.placements, plan.inner, rank).shape
        return value._replace(shape=tuple(shape))
    return cut(value, spec.placements, plan.inner, rank)


def _argument(value: Tensor, plan: Plan, slot: int, rank: int) -> Any:
    if plan.pipeline is None:
        return _part(value, plan, slot, rank)
    return [_part(one, plan, slot, rank) for one in value.chunk(plan.pipeline.microbatches)]
