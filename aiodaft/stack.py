"""Stacks of all processes of a runtime: the result of `rt.stack()` and the output of `aiodaft stack`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["CallStack", "Frame", "ProcessStack", "RuntimeStack", "TaskStack", "ThreadStack"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    Attributes:
        file: The source file.
        line: Number of the line, from 1.
        function: The function it is in.
        code: The line itself; empty if the source is not there.
    """

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}{self.code and f': {self.code}'}"


@dataclass(frozen=True, slots=True)
class CallStack:
    """A call that runs in an actor, or waits there.

    Attributes:
        actor: Name of the actor.
        method: The method, such as "Model.step".
        caller: Id of the process that called.
        state: "running", "queued", or "needs arguments".
        seconds: The time for which it has run; None if it has not begun.
        waits_for: The calls it waits for, such as "Server.get of Server-1": for their results, or for their end.
        frames: Its stack, outermost first, without the runtime's own frames.
    """

    actor: str
    method: str
    caller: str
    state: str
    seconds: float | None
    waits_for: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread.

    Attributes:
        name: Its name; an actor's thread has that of the actor.
        frames: Its stack, outermost first.
    """

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class TaskStack:
    """An asyncio task that is not a call: one of the program, or one that a method has started.

    Attributes:
        name: Its name.
        waits_for: The calls that it is seen to await.
        frames: The chain of coroutines, outermost first.
    """

    name: str
    waits_for: tuple[str, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """One process.

    Attributes:
        id: Its id in the runtime.
        pid: Its pid; None if it has not started yet.
        actors: The actors in it.
        asked_for: None if it answered; else the seconds for which it has not, because its loop does not turn.
        calls: The calls of its actors, running calls first.
        threads: Its threads, without those that run only the runtime's own code.
        tasks: Its other tasks.
        collectives: Those of groups that meet at one of its actors, and those on refs that it has issued, with the
            ranks that have not come.
        dump: The threads of a process that did not answer, from Python's `faulthandler`, which also works while C code
            holds the interpreter. Empty if the process is stopped.
    """

    id: str
    pid: int | None
    actors: tuple[str, ...]
    asked_for: float | None = None
    calls: tuple[CallStack, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    tasks: tuple[TaskStack, ...] = ()
    dump: str = ""
    collectives: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether the process answered."""
        return self.asked_for is None

    @property
    def title(self) -> str:
        """The names of its actors, or "the controller"."""
        return " and ".join(self.actors) or "the controller"

    def _lines(self, titles: Mapping[str, str]) -> Iterator[str]:
        yield f"{self.title} (pid {self.pid or '?'}, {self.id})"
        if self.asked_for is not None:
            yield f"  does not answer, for {self.asked_for:.1f} s by now"
            yield from _indented(self.dump.splitlines())
        for call in self.calls:
            since = "" if call.seconds is None else f" for {call.seconds:.1f} s"
            caller = titles.get(call.caller, call.caller)
            yield f"  {call.method} of {call.actor}: {call.state}{since}, called by {caller}"
            yield from _indented((*call.frames, *_named(call.waits_for, titles)))
        for task in self.tasks:
            yield f"  task {task.name}"
            yield from _indented((*task.frames, *_named(task.waits_for, titles)))
        for collective in self.collectives:
            yield f"  {collective}"
        for thread in self.threads:
            yield f"  thread {thread.name}"
            yield from _indented(thread.frames)

    def __str__(self) -> str:
        return "\n".join(self._lines({}))


@dataclass(frozen=True, slots=True)
class RuntimeStack:
    """The stacks of every process of a runtime; `str()` gives them as text.

    Attributes:
        processes: One entry per process, controller first.
    """

    processes: tuple[ProcessStack, ...]

    def __str__(self) -> str:
        titles = {process.id: process.title for process in self.processes}
        return "\n".join(line for process in self.processes for line in process._lines(titles))


def _named(waits_for: tuple[str, ...], titles: Mapping[str, str]) -> Iterator[str]:
    for call in waits_for:
        # A process knows only the location of a call that another process made.
        what, inside, process = call.rpartition(" in ")
        yield f"waits for {what}{inside}{titles.get(process, process)}"


def _indented(lines: Iterable[object]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
