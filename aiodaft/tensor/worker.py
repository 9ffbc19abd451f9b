"""Executes programs on local tensors: the actor in each process of `Workers`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

import aiodaft.tensor.randoms  # noqa: F401 - its operations
from aiodaft.actor import Actor
from aiodaft.member import CurrentGroup, Planned, current_group
from aiodaft.memory import borrow
from aiodaft.methods import method
from aiodaft.tensor.code import Code, Pending, Routine, Watch
from aiodaft.tensor.instructions import Slot, slots_of
from aiodaft.tensor.stage_runs import Pipe, StagedRoutine, StageRuns
from aiodaft_transport.system import start_thread

if TYPE_CHECKING:
    from aiodaft.tensor.code import Compiled

# The names of the seed, and of the number of the next step, in a state.
SEED: Final = "random.seed"
STEP: Final = "random.step"


class Program(NamedTuple):
    """A routine with its place in the table of a worker.

    Attributes:
        state: The numbers of its first inputs.
        outs: The numbers that its outputs get; None for those that the table does not keep.
        returns: The positions of the outputs that this rank returns.
        first: The number of the first run, if it is an input: that after the state.
    """

    routine: Routine | StagedRoutine
    state: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    outs: tuple[int | None, ...] = ()
    returns: tuple[int, ...] = ()
    first: int | None = None
    parameters: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()
    compiled: bool = False


class Order(NamedTuple):
    """A message to a worker: to run a program once.

    Attributes:
        session: The controller; each has a table and collectives of its own.
        attempt: Counts the failures that the controller knows of. A worker refuses the orders that follow a failure.
        values: The inputs after the state: tensors, numbers, and `Slot`s for tensors of the table.
        outs: The numbers that the outputs get, in place of those of the program.
        frees: The numbers of tensors that end with this run, also if it fails.
    """

    session: str
    attempt: int
    name: str
    values: Sequence[Any] = ()
    outs: Sequence[int | None] | None = None
    frees: Sequence[int] = ()
    program: Program | None = None


class Progress(NamedTuple):
    """The runs of a program at a rank.

    Attributes:
        done: The number of runs that have ended.
        changing: Whether one has failed after it had begun to change the state.
        collectives: The number of collectives, by axis.
        received: The bytes that this rank had to receive, by axis; see `Collective.received`.
        segments: The number of functions that were given to torch.compile.
        plain: For each of them that runs as it is written, the reason.
    """

    done: int
    changing: bool
    collectives: Mapping[str, int]
    received: Mapping[str, int]
    segments: int = 0
    plain: tuple[str, ...] = ()


class Measure(NamedTuple):
    """The most bytes that a rank had at one time in a run: of all tensors, and of parameters."""

    peak: int
    parameters: int


class Counted(NamedTuple):
    """The random numbers of a step: the name of its program, their seed, and the number of the first run."""

    name: str
    seed: int
    first: int


class Filled(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float


class Refused(RuntimeError):
    """A run was not begun, since an earlier one has failed."""


class Worker(Actor):
    """A member of `Workers`. Classes that extend it have methods that see the local tensors, beside the programs.

    The threads of torch are one, unless `cpus` or `OMP_NUM_THREADS` say otherwise.
    """

    def __init__(self) -> None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self._sessions: dict[str, _Session] = {}

    def state(self, name: str) -> dict[str, Tensor]:
        """The local parts of the state of the loaded step with this `name`, by name.

        Raises:
            KeyError: No such step is loaded.
        """
        for session in self._sessions.values():
            if name in session.loaded:
                program = session.loaded[name].program
                return {one: session.find(n) for one, n in zip(program.names, program.state, strict=True)}
        raise KeyError(f"no step {name!r} is loaded at this worker")

    @method
    def run(self, order: Order) -> tuple[Any, ...]:
        """Run a program; returns this rank's results. An error ends the attempt for all members."""
        return self._run(order, None)

    @method
    def measure(self, order: Order) -> tuple[tuple[Any, ...], Measure]:
        """As `run`, slowly; returns also the most memory that it took."""
        session = self._session(order.session)
        meter = _Meter(session.tensors, session.loaded[order.name].program)
        return self._run(order, meter), meter.most

    def _run(self, order: Order, meter: _Meter | None) -> tuple[Any, ...]:
        session = self._session(order.session)
        try:
            session.begin(order.attempt)
            with torch.no_grad():
                return session.run(order, meter)
        except BaseException as error:
            session.fail(error)
            raise
        finally:
            for number in order.frees:
                session.tensors.pop(number, None)

    @method
    def load(self, program: Program, session: str, name: str) -> None:
        self._session(session).load(name, program)

    @method
    def unload(self, session: str, names: list[str]) -> None:
        here = self._session(session)
        for name in names:
            gone = here.loaded.pop(name, None)
            for number in gone.program.state if gone is not None else ():
                here.tensors.pop(number, None)

    @method
    def end(self, session: str) -> None:
        if (here := self._sessions.pop(session, None)) is not None:
            here.fail(RuntimeError("the session has ended"))

    @method
    def put(self, tensors: dict[int, Tensor | Filled], session: str) -> None:
        """Keep copies of tensors."""
        table = self._session(session).tensors
        for number, one in tensors.items():
            if isinstance(one, Filled):
                table[number] = torch.full(one.shape, one.value, dtype=one.dtype)
            else:
                table[number] = one.detach().clone()

    @method
    def get(self, numbers: list[int], session: str) -> list[Tensor]:
        here = self._session(session)
        return [here.find(number) for number in numbers]

    @method
    def part(self, session: str, number: int) -> Tensor:
        return self._session(session).find(number)

    @method
    def shard(self, session: str, number: int) -> dict[str, Tensor]:
        """Return a local part, for `aiodaft.resharding`."""
        return {"x": self._session(session).find(number)}

    @method
    def adopt(
        self, part: Tensor | dict[str, Tensor], session: str, number: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Keep a tensor that another method or a move has made; returns its shape, strides and dtype.

        Raises:
            TypeError: It is no tensor.
        """
        tensor = part["x"] if isinstance(part, dict) else part
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the part of rank {current_group().rank} is no tensor: {tensor!r:.100}")
        self._session(session).tensors[number] = tensor.detach()
        return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype

    @method
    def give(self, numbers: dict[str, int], session: str) -> dict[str, Tensor]:
        """Return local parts by name, for `aiodaft.resharding`; borrowed, since nothing writes to them meanwhile."""
        here = self._session(session)
        return borrow({name: here.find(number) for name, number in numbers.items()})

    @method
    def begin_copy(self, numbers: dict[str, int], session: str, key: str, counted: Counted | None) -> None:
        """Begin to copy local parts beside the next runs, which wait before they change these."""
        self._session(session).begin_copy(numbers, key, counted)

    @method
    async def copied(self, begun: None, session: str, key: str) -> dict[str, Tensor]:
        """Return the copies that `begin_copy` makes, of which this gets the result."""
        return borrow(await asyncio.wrap_future(self._session(session).copies.pop(key)))

    @method
    def take(self, parts: dict[str, Tensor], numbers: dict[str, int], session: str) -> None:
        self._session(session).tensors.update({numbers[name]: part for name, part in parts.items()})

    @method
    def progress(self, session: str, name: str) -> Progress:
        return self._session(session).loaded[name].progress()

    def _session(self, name: str) -> _Session:
        found = self._sessions.get(name)
        if found is None:
            found = self._sessions[name] = _Session(name, current_group())
        return found


class _Session:
    def __init__(self, name: str, group: CurrentGroup[Any]) -> None:
        self._name = name
        self._rank = group.rank
        self._rows = {axis: _Axis(group.coords[axis], size) for axis, size in group.axes.items()}
        self._attempt = -1
        self._failed = ""
        self.tensors: dict[int, Tensor] = {}
        self.loaded: dict[str, _Loaded] = {}
        # Copies that `copied` will ask for, and those that are being made.
        self.copies: dict[str, Future[dict[str, Tensor]]] = {}
        self._copying: list[Future[dict[str, Tensor]]] = []

    def begin(self, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt, self._failed = attempt, ""
            group = current_group()
            for axis, row in self._rows.items():
                row.plan = group.along(axis).plan(key=("tensor", self._name, attempt)).result()
        elif self._failed or attempt < self._attempt:
            raise Refused(f"not run at rank {self._rank}: an earlier run has failed: {self._failed}")

    def fail(self, error: BaseException) -> None:
        """End this attempt, for all members: each waits for the others no more."""
        if not self._failed:
            self._failed = f"{type(error).__name__}: {error}"
            for row in self._rows.values():
                if row.plan is not None:
                    row.plan.close()

    def begin_copy(self, numbers: Mapping[str, int], key: str, counted: Counted | None) -> None:
        parts = {name: self.find(number) for name, number in numbers.items()}
        if counted is not None and self._rank == 0:
            done = self.loaded[counted.name].done
            parts |= {SEED: torch.tensor(counted.seed), STEP: torch.tensor(counted.first + done)}
        copies = Future[dict[str, Tensor]]()
        start_thread(_copy, parts, copies, name="copy of the state")
        # Nobody asks for done ones: their calls of `copied` were cancelled.
        self.copies = {one: made for one, made in self.copies.items() if not made.done()} | {key: copies}
        self._copying.append(copies)

    def wait_copied(self) -> None:
        """Wait before tensors change."""
        if self._copying:
            wait([one for one in self._copying if not one.done()])
            self._copying = []

    def load(self, name: str, program: Program) -> _Loaded:
        routine, segments = program.routine, list["Compiled"]()
        if program.compiled:
            routine, segments = self._compiled(routine, program.numbers)
        loaded = _Loaded(program, self._code(routine, None), self._rows, segments, self.wait_copied)
        self.loaded[name] = loaded
        return loaded

    def _compiled(
        self, routine: Routine | StagedRoutine, numbers: Sequence[int]
    ) -> tuple[Routine | StagedRoutine, list[Compiled]]:
        from aiodaft.tensor.code import with_compiled  # noqa: PLC0415 - it loads the compiler

        if isinstance(routine, Routine):
            return with_compiled(routine, self._rank, numbers)
        made = {key: with_compiled(one, self._rank, numbers) for key, one in routine.segments.items()}
        parts = {key: one for key, (one, _) in made.items()}
        return routine._replace(segments=parts), [one for _, compiled in made.values() for one in compiled]

    def _code(self, routine: Routine | StagedRoutine, watch: Watch | None) -> Code | StageRuns:
        make = StageRuns if isinstance(routine, StagedRoutine) else Code
        return make(routine, self._rank, self._rows, watch)  # type: ignore[arg-type]  # each takes its own routine

    def find(self, number: int) -> Tensor:
        try:
            return self.tensors[number]
        except KeyError:
            raise KeyError(f"rank {self._rank} has no tensor {number}") from None

    def run(self, order: Order, meter: _Meter | None) -> tuple[Any, ...]:
        loaded = self.loaded.get(order.name) if order.program is None else self.load(order.name, order.program)
        if loaded is None:
            raise KeyError(f"rank {self._rank} has no program {order.name}: load it again")
        program, code, tensors = loaded.program, loaded.code, self.tensors
        if meter is not None:
            code = meter.code = self._code(program.routine, meter.watch)
        values: list[Any] = [self.find(number) for number in program.state]
        if program.first is not None:
            values.append(program.first + loaded.done)
        values += [self.find(one.number) if type(one) is Slot else one for one in order.values]
        outputs = loaded.run(code, values, tensors, program.outs if order.outs is None else order.outs)
        return tuple(outputs[at] for at in program.returns)


class _Loaded:
    def __init__(
        self,
        program: Program,
        code: Code | StageRuns,
        rows: Mapping[str, _Axis],
        segments: Sequence[Compiled],
        fence: Callable[[], None],
    ) -> None:
        self._fence = fence
        self.program = program
        self.code = code
        self._segments = segments
        self._rows = rows
        inputs = zip(program.state, program.routine.inputs, strict=False)
        self._donated = [number for number, slot in inputs if slot in program.routine.donated]
        self.done = 0
        self._changing = False
        self._counts: dict[str, tuple[int, int]] = dict.fromkeys(rows, (0, 0))

    def run(
        self, code: Code | StageRuns, values: list[Any], tensors: dict[int, Tensor], outs: Sequence[int | None]
    ) -> tuple[Any, ...]:
        def update() -> None:
            self._fence()
            # From here on, a failure leaves the state neither as it was nor as it is to be.
            self._changing = True
            for number in self._donated:
                tensors.pop(number, None)

        rows: dict[str, _Axis | Pipe] = dict(self._rows)
        if isinstance(code, StageRuns) and code.axis:
            rows[code.axis] = code.pipe
        before = [(row.begun, row.received) for row in rows.values()]
        outputs = code.run(values, update)
        for (axis, row), (begun, received) in zip(rows.items(), before, strict=True):
            here = self._counts[axis]
            self._counts[axis] = here[0] + row.begun - begun, here[1] + row.received - received
        tensors.update((number, one) for number, one in zip(outs, outputs, strict=True) if number is not None)
        self.done += 1
        self._changing = False
        return outputs

    def progress(self) -> Progress:
        counts = self._counts.items()
        return Progress(
            self.done,
            self._changing,
            {axis: one[0] for axis, one in counts},
            {axis: one[1] for axis, one in counts},
            len(self._segments),
            tuple(one.reason for one in self._segments if one.reason),
        )


def _copy(parts: Mapping[str, Tensor], copies: Future[dict[str, Tensor]]) -> None:
    try:
        copies.set_result({name: part.clone() for name, part in parts.items()})
    except BaseException as error:  # noqa: BLE001 - the thread has no other use
        copies.set_exception(error)


class _Axis:
    """The members along one axis: their planned collectives, counted. It is a `Row`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.begun = 0
        self.received = 0
        self.plan: Planned | None = None

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending[Tensor]:
        return self._begin(2 * tensor.nbytes * (self.size - 1) // self.size).all_reduce(tensor, op).start()

    def reduce_scatter(self, parts: Sequence[Tensor], op: Any) -> Pending[Tensor]:
        return self._begin(parts[self.rank].nbytes * (self.size - 1)).reduce_scatter(parts, op).start()

    def all_gather(self, tensor: Tensor) -> Pending[Sequence[Tensor]]:
        return _Parts(self, self._begin(0).all_gather(tensor).start())

    def all_to_all(self, parts: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        return _Parts(self, self._begin(0).all_to_all(parts).start())

    def _begin(self, received: int) -> Planned:
        self.begun += 1
        self.received += received
        assert self.plan is not None
        return self.plan


class _Parts(NamedTuple):
    axis: _Axis
    pending: Pending[Sequence[Tensor]]

    def result(self) -> Sequence[Tensor]:
        parts, axis = self.pending.result(), self.axis
        axis.received += sum(part.nbytes for rank, part in enumerate(parts) if rank != axis.rank)
        return parts


# Give tensors with the elements of a parameter in other places.
_MOVES: Final = frozenset({"alias", "all_gather", "all_to_all", "chunk", "join", "split"})


class _Meter:
    """The memory that a run takes: storages that the table or a local variable refers to."""

    def __init__(self, table: Mapping[int, Tensor], program: Program) -> None:
        self.most = Measure(0, 0)
        self._table = table
        self.code: Code | StageRuns | None = None
        slots = set(program.parameters)
        for one in program.routine.instructions:
            if one.kind in _MOVES and slots.issuperset(slots_of(one.args)):
                slots.update(n for n in one.outs if n is not None)
        self._names = {f"v{slot}" for slot in slots}
        self._parameters: set[int] = set()

    def watch(self, variables: Mapping[str, Any]) -> None:
        here = {name: one for name, one in variables.items() if isinstance(one, Tensor)}
        held = self.code.held() if self.code is not None else ()
        sizes = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in (*self._table.values(), *here.values(), *held)
            if isinstance(one, Tensor)
        }
        # Memory that ended may be that of another tensor now.
        self._parameters &= sizes.keys()
        self._parameters |= {one.untyped_storage().data_ptr() for name, one in here.items() if name in self._names}
        peak, parameters = sum(sizes.values()), sum(sizes[at] for at in self._parameters)
        self.most = Measure(max(self.most.peak, peak), max(self.most.parameters, parameters))
