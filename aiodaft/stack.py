"""What every process of a runtime is in the middle of: what `rt.stack()` gives and `aiodaft stack` prints."""

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
    """A call that an actor has: it runs, or waits for its turn.

    Attributes:
        actor: Name of the actor.
        method: What was called, such as "Model.step".
        caller: Id of the process that called.
        state: "running", "queued", or "needs arguments".
        seconds: For how long it has run; None if it has not begun.
        waits_for: The calls it waits for, such as "Server.get of Server-1": their results, or that they let it in.
        frames: Where it is, outermost first, without the runtime's own frames.
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
        frames: Where it is, outermost first.
    """

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class TaskStack:
    """An asyncio task that is no call: of the program itself, or one that a method has started.

    Attributes:
        name: Its name.
        waits_for: The calls whose results it awaits, as far as that can be seen.
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
        pid: Its pid.
        actors: The actors in it.
        asked_for: None if it answered; else the seconds for which it was asked in vain, because its loop does not turn.
        calls: The calls of its actors, those that run first.
        threads: Its threads.
        tasks: Its tasks besides those of calls.
        dump: Of a process that did not answer: its threads as Python's `faulthandler` sees them, which works also
            while C code keeps the interpreter to itself. Empty if it is stopped.
    """

    id: str
    pid: int
    actors: tuple[str, ...]
    asked_for: float | None = None
    calls: tuple[CallStack, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    tasks: tuple[TaskStack, ...] = ()
    dump: str = ""

    @property
    def answered(self) -> bool:
        """Whether it gave this itself."""
        return self.asked_for is None

    @property
    def title(self) -> str:
        """What to call it."""
        return " and ".join(self.actors) or "the controller"

    def _lines(self, titles: Mapping[str, str]) -> Iterator[str]:
        yield f"{self.title} (pid {self.pid}, {self.id})"
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
        for thread in self.threads:
            yield f"  thread {thread.name}"
            yield from _indented(thread.frames)

    def __str__(self) -> str:
        return "\n".join(self._lines({}))


@dataclass(frozen=True, slots=True)
class RuntimeStack:
    """Every process of a runtime, the controller first. As text, something to read.

    Attributes:
        processes: They.
    """

    processes: tuple[ProcessStack, ...]

    def __str__(self) -> str:
        titles = {process.id: process.title for process in self.processes}
        return "\n".join(line for process in self.processes for line in process._lines(titles))


def _named(waits_for: tuple[str, ...], titles: Mapping[str, str]) -> Iterator[str]:
    for call in waits_for:
        # Of a call that a process awaits without having made it, it knows only where it is.
        what, inside, process = call.rpartition(" in ")
        yield f"waits for {what}{inside}{titles.get(process, process)}"


def _indented(lines: Iterable[object]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
