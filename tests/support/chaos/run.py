"""Runs rounds of chaos, and looks from outside whether every promise was kept."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Final

from inside import up_again
from leaks import descendants

from aiodaft._protocol.supervision import Backoff, Restart
from aiodaft.exceptions import ActorDied, DaftError
from aiodaft.runtime import Runtime
from aiodaft.testing.in_process import Faults
from aiodaft_transport import Unreachable, check_name, default_name

from .actors import LOGGER, Victim
from .deeds import ALONE, DEEDS, Cast, WrongValue
from .judge import Hang, judge
from .plan import ACTORS, CREW, FOLLOWED, Fault, Harm, Op, Round, rounds, transport_of
from .stage import Machine, Stage

__all__ = ["Report", "torment"]

# Far beyond any operation's time: an operation that takes longer hangs.
_HANG: Final = 60.0
# A runtime is closed and looked at after so many rounds.
_ROUNDS_PER_RUNTIME: Final = 12
# More than a run can kill.
_ALWAYS: Final = Restart(intensity=10_000, period=3600, backoff=Backoff(base=0))


@dataclass
class Report:
    """The result of a run."""

    seed: int
    transport: str
    rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    # The number of times that a killed actor came back.
    returns: int = 0
    # Processes that had no descriptors for a moment, and may never have been connected to others.
    apart: set[int] = field(default_factory=set[int])
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.transport}: {self.rounds} rounds, {self.outcomes.total()} operations",
            "  outcomes: " + ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common()),
            "  faults:   " + (", ".join(f"{name} {count}" for name, count in self.faults.most_common()) or "none"),
            f"  killed actors that came back: {self.returns}",
            f"  broken promises: {len(self.violations)}",
            *(f"    {violation}" for violation in self.violations),
        ]
        return "\n".join(lines)


async def torment(
    seed: int,
    seconds: float,
    folder: Path,
    stage: Stage | None = None,
    *,
    rounds_per_runtime: int = _ROUNDS_PER_RUNTIME,
) -> Report:
    """Run rounds for some time, at least as many as one runtime gets, until a promise is broken.

    Args:
        seed: Decides the events. (Their exact times are up to the machine.)
        seconds: The time of the run; a runtime that is open by then is used to its end.
        folder: For notes; empty.
        stage: The place of the run. Default: this machine.
        rounds_per_runtime: Rounds after which the runtime is closed, and checked for objects that are left.
    """
    report = Report(seed, _transport(seed))
    plan, before = rounds(seed), descendants()
    stage = stage or Machine(folder)
    end = time.monotonic() + seconds
    with _quiet():
        while True:
            notes = folder / f"notes-{report.rounds}"
            await _one_runtime(islice(plan, rounds_per_runtime), report, notes, stage)
            if left := descendants() - before:
                report.violations.append(f"processes are left after the runtime was closed: {left}")
            if report.violations or time.monotonic() >= end:
                return report


def _transport(seed: int) -> str:
    name = transport_of(seed)
    try:
        return check_name(name)
    except Unreachable:
        return default_name()


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Leave out the errors of actors that are killed between calls."""
    logger, victims = logging.getLogger("aiodaft"), logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    # For the files alone.
    victims.setLevel(logging.INFO)
    victims.propagate = False
    victims.handlers = [logging.NullHandler()]
    try:
        yield
    finally:
        logger.setLevel(before)


async def _one_runtime(plan: Iterable[Round], report: Report, notes: Path, stage: Stage) -> None:
    async with stage.runtime(report.transport) as runtime:
        crew = await stage.spawner(runtime, None, restart=_ALWAYS).group(len(CREW), Victim, notes)
        actors = Cast(runtime, crew)
        for round_ in plan:
            actors[:] = await _repopulate(runtime, actors, notes, stage)
            await _one_round(runtime, actors, round_, notes, stage, report)
            if report.violations:
                break


async def _repopulate(runtime: Runtime, actors: Cast, notes: Path, stage: Stage) -> list[Victim]:
    """The same actors, with new ones in the places of the dead ones."""
    there = [await _is_there(runtime, actor, followed=index in FOLLOWED) for index, actor in enumerate(actors)]
    spawners = [
        stage.spawner(runtime, index, restart=_ALWAYS if index in FOLLOWED else None)
        for index in range(ACTORS - len(CREW))
    ]
    alone = [
        actors[index] if actors and there[index] else await spawner.spawn(Victim, notes)
        for index, spawner in enumerate(spawners)
    ]
    return [*alone, *actors.crew]


async def _is_there(runtime: Runtime, actor: Victim, *, followed: bool) -> bool:
    """Whether an actor takes calls; one that is restarted is waited for."""
    with suppress(ActorDied, TimeoutError):
        async with asyncio.timeout(_HANG):
            while not (alive := (await runtime.info(actor)).alive) and followed:
                await up_again(runtime, actor)
            return alive
    return False


async def _one_round(runtime: Runtime, actors: Cast, round_: Round, notes: Path, stage: Stage, report: Report) -> None:
    report.rounds += 1
    pids = [(await runtime.info(actor)).pid for actor in actors]
    async with asyncio.TaskGroup() as group:
        ops = [group.create_task(_one_op(op, actors)) for op in round_.ops]
        for fault in round_.faults:
            report.faults[fault.harm.value] += 1
            group.create_task(_harm(runtime, fault, actors[fault.actor], pids[fault.actor], stage))
    report.apart.update(pids[fault.actor] for fault in round_.faults if fault.harm is Harm.EXHAUST)
    hurt = any(fault.harm is not Harm.FREEZE for fault in round_.faults)
    apart = not report.apart.isdisjoint(pids)
    ran = _what_ran(notes)
    for op, task in zip(round_.ops, ops, strict=True):
        error = task.result()
        report.outcomes["value" if error is None else type(error).__name__] += 1
        report.violations += judge(op, error, ran, hurt=hurt or (apart and op.deed not in ALONE))
    for index in round_.unharmed():
        info = await runtime.info(actors[index])
        if not (info.alive and info.pid == pids[index]):
            report.violations.append(f"actor {index} was neither killed nor stopped, and is gone: {info.last_error!r}")
    for index in round_.survivors():
        if not await _is_there(runtime, actors[index], followed=True):
            report.violations.append(f"actor {index} was not stopped, and did not come back")
        report.returns += (await runtime.info(actors[index])).pid != pids[index]


def _what_ran(notes: Path) -> Counter[int]:
    return Counter(map(int, notes.read_text(encoding="ascii").split())) if notes.exists() else Counter()


async def _one_op(op: Op, actors: Cast) -> BaseException | None:
    await asyncio.sleep(op.at)
    limit = asyncio.timeout(_HANG)
    try:
        async with limit:
            await DEEDS[op.deed](op, actors)
    except (DaftError, OSError, WrongValue) as error:
        return Hang(f"no end after {_HANG:g} s") if limit.expired() else error
    except ExceptionGroup as errors:
        # Of a task group in a method.
        return errors.exceptions[0]
    return None


async def _harm(runtime: Runtime, fault: Fault, actor: Victim, pid: int, stage: Stage) -> None:
    await asyncio.sleep(fault.at)
    match fault.harm:
        case Harm.STOP:
            await runtime.stop(actor)
        case Harm.CUT:
            # It may have ended.
            with suppress(DaftError, ValueError):
                await Faults().cut(actor)
        case Harm.NO_THREADS:
            with suppress(DaftError):
                await actor.go_without_threads(fault.lasting)
        case Harm.TROUBLE:
            await stage.trouble(fault.lasting)
        case _:
            with suppress(ProcessLookupError):
                await _harm_process(fault, pid)


async def _harm_process(fault: Fault, pid: int) -> None:
    if fault.harm is Harm.KILL:
        os.kill(pid, signal.SIGKILL)
    elif fault.harm is Harm.EXHAUST:
        with _no_more_descriptors(pid):
            await asyncio.sleep(fault.lasting)
    else:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(fault.lasting)
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _no_more_descriptors(pid: int) -> Generator[None, None, None]:
    """A process keeps the descriptors that it has, and gets no others."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with suppress(FileNotFoundError):
        taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(fd for fd in count() if fd not in taken), before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
