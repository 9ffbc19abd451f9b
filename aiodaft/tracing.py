"""Traces of all processes of a runtime: `rt.trace()`."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.diagnostics.trace import Ping, ProcessTrace, offset_of, trace_file
from aiodaft._protocol.ids import PeerId, node_of
from aiodaft._runtime.diagnostics.process_view import answer_to
from aiodaft._runtime.diagnostics.tracing import Tracing
from aiodaft._runtime.node.worker import WorkerProcess
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.linux import clock_id
from aiodaft._runtime.platform.tasks import logger, private, shield_from_anyio
from aiodaft.exceptions import DaftError

__all__ = ["Trace"]

T = TypeVar("T")

_PINGS: Final = 8
_numbers: Final = itertools.count(1)


class Trace:
    """A trace of all processes of a runtime; see `Runtime.trace`.

    Attributes:
        path: The file.
        left_out: Processes whose events are missing, by the names of their actors, and why. Known after the block.
        dropped: The number of events for which a process had no room, by the names of its actors. Known after the
            block.
    """

    def __init__(self, owner: Owner, path: str | os.PathLike[str], limit: int, patience: float) -> None:
        if limit < 1 or not patience > 0:
            raise ValueError(f"limit={limit!r}, patience={patience!r}: positive numbers are needed")
        self.path = os.fspath(path)
        self.left_out: dict[str, str] = {}
        self.dropped: dict[str, int] = {}
        self._owner = owner
        self._limit = limit
        self._patience = patience
        self._number = next(_numbers)
        self._began = 0.0
        self._offsets: dict[str, float] = {}
        # The processes that were asked to record, and those that do, by the names of their actors.
        self._asked: set[PeerId] = set()
        self._known: dict[PeerId, str] = {}

    @property
    def _tracing(self) -> Tracing:
        return self._owner.process.part(Tracing)

    async def __aenter__(self) -> Self:
        owner, session = self._owner, (self._owner.process.id, self._number)
        owner.check_running("nothing can be traced")
        if self._tracing.session is not None:
            raise RuntimeError(f"{self.path} cannot be recorded: another trace is, until its block ends")
        # First, so that a wrong path is no surprise at the end.
        await self._in_thread(lambda: _write(self.path, {"traceEvents": []}))
        await owner.ready()
        # Another block may have begun meanwhile, also one of this process.
        if self._tracing.session is not None or not self._tracing.begin(*session, self._limit):
            raise RuntimeError(f"{self.path} cannot be recorded: another trace is, until its block ends")
        try:
            await asyncio.gather(*map(self._ask_clock, owner.nodes.members()))
            await asyncio.gather(*map(self._begin, await self._processes()))
        except BaseException:
            self._tracing.end()
            self._end_others()
            raise
        self._began = owner.process.env.monotonic()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = self._owner.process.env.monotonic()
        try:
            with shield_from_anyio():
                parts = await self._collect()
        except BaseException:
            self._end_others()
            raise
        finally:
            own = self._tracing.end()
        if own is not None:
            parts.insert(0, own)
        offsets = [(part, self._offsets.get(node_of(part.id), 0.0)) for part in parts]

        def write() -> None:
            _write(self.path, trace_file(offsets, self._began, ended, self.left_out))

        with shield_from_anyio():
            await self._in_thread(write)
        self._warn(parts)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run something long. The other threads have work of the program."""
        process = self._owner.process
        thread = process.env.thread("aiodaft trace", process.loop)
        try:
            result = await thread.run(work)
            await thread.aclose()
            return result
        finally:
            thread.close()

    async def _processes(self) -> list[WorkerProcess]:
        """The workers with actors that this process owns, and with those that these own."""

        async def ask(member: Member) -> Iterable[WorkerProcess]:
            with suppress(DaftError, TimeoutError):
                return await answer_to(self._owner.nodes.named(member.name).processes(), self._patience)
            return ()

        found = await asyncio.gather(*map(ask, self._owner.nodes.members()))
        others, mine = list(itertools.chain.from_iterable(found)), {self._owner.process.id}
        while more := [process.id for process in others if process.owner in mine and process.id not in mine]:
            mine.update(more)
        return [process for process in others if process.id in mine and process.id != self._owner.process.id]

    async def _begin(self, process: WorkerProcess) -> None:
        self._asked.add(process.id)
        beginning = self._owner.agent_of(process.id).begin_trace(self._owner.process.id, self._number, self._limit)
        try:
            has_actors = await answer_to(beginning, self._patience)
        except TimeoutError:
            has_actors = True
        except DaftError:
            has_actors = False
        if has_actors is None:
            self.left_out[_name_of(process)] = "it records the trace of another process"
        elif has_actors:
            # Another one has ended, or is about to end: nothing of it is missed.
            self._known[process.id] = _name_of(process)

    async def _ask_clock(self, member: Member) -> None:
        agent, now = self._owner.agent_of(member.peer), self._owner.process.env.monotonic
        pings: list[Ping] = []
        with suppress(DaftError, TimeoutError):
            for _ in range(_PINGS):
                sent = now()
                clock, theirs = await answer_to(agent.clock(), self._patience)
                if clock == clock_id():
                    self._offsets[member.name] = 0.0
                    return
                pings.append(Ping(sent, theirs, now()))
            self._offsets[member.name] = offset_of(pings)

    async def _collect(self) -> list[ProcessTrace]:
        """The records of the others. Notes those that are left out."""
        tracing, owner = self._tracing, self._owner
        found = {process.id: process for process in await self._processes()} if owner.is_open else {}
        expected = {**tracing.told, **self._known}
        self._known = {**expected, **{one: _name_of(process) for one, process in found.items()}}
        strange = [one for one in owner.nodes.members() if one.name not in self._offsets]
        await asyncio.gather(*map(self._ask_clock, strange))
        parts = [part for part in await asyncio.gather(*map(self._fetch, found)) if part is not None]
        parts += tracing.handed_over
        # A process that is about to end without ever having been told has nothing to give.
        for process in expected.keys() - {part.id for part in parts}:
            self.left_out.setdefault(self._known[process], "it ended before it could give its events")
        for part in parts:
            if node_of(part.id) not in self._offsets:
                self.left_out[self._known.get(part.id, part.id)] = "the clock of its machine is not known"
        return [part for part in parts if node_of(part.id) in self._offsets]

    async def _fetch(self, process: PeerId) -> ProcessTrace | None:
        """The record of a process; None if it has ended, or is about to end, and hands it over by itself."""
        try:
            ending = self._owner.agent_of(process).end_trace(self._owner.process.id, self._number)
            return await answer_to(ending, self._patience)
        except TimeoutError:
            self.left_out[self._known[process]] = f"it did not answer in {self._patience:g} s"
        except DaftError:
            pass
        return None

    def _end_others(self) -> None:
        """Have the others end the records that will not be fetched, without waiting for them."""
        with suppress(DaftError):
            for process in self._asked | self._tracing.told.keys():
                self._owner.agent_of(process).end_trace.tell(self._owner.process.id, self._number)

    def _warn(self, parts: Sequence[ProcessTrace]) -> None:
        for part in parts:
            if part.dropped:
                name = self._known.get(part.id, "the program")
                self.dropped[name] = self.dropped.get(name, 0) + part.dropped
        for name, count in self.dropped.items():
            logger.warning("%s lacks the last %d events of %s: it has room for %d", self.path, count, name, self._limit)
        for name, why in self.left_out.items():
            logger.warning("%s lacks the events of %s: %s", self.path, name, why)


def _name_of(process: WorkerProcess) -> str:
    return " and ".join(process.actors) or process.id


def _write(path: str, content: dict[str, Any]) -> None:
    """Write a file that is valid at any time."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(errno.EEXIST, "it is there, and no file: a trace would replace it", path)
    unfinished = f"{path}.part"
    try:
        with open(unfinished, "w", encoding="utf-8", opener=private) as file:
            json.dump(content, file, separators=(",", ":"))
        os.replace(unfinished, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
