"""pdb for actors; see `worker_main.py`, which loads this when pdb is loaded."""

from __future__ import annotations

import dis
import os
import pdb
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, Final

from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.diagnostics.attach import Line
from aiodaft._runtime.diagnostics.await_chains import is_ours

# Modules in which no step ends: those that call methods, and those that run while one waits.
_SKIPPED: Final = ("aiodaft", "aiodaft.*", "aiodaft_transport.*", "asyncio.*", "uvloop", "uvloop.*")


class ActorPdb(pdb.Pdb):
    terminal: ClassVar = ""
    # Python 3.14 keeps one here for the next breakpoint, to which another thread may come meanwhile.
    _last_pdb_instance: ClassVar[Any] = None

    def __init__(
        self, completekey: str = "tab", stdin: Any = None, stdout: Any = None, *args: Any, **options: Any
    ) -> None:
        # Another debugger, such as one that is reached by a port, has its own.
        self._line = Line(self.terminal) if stdin is None and stdout is None else None
        if self._line is not None:
            # Signals are for the controller; events of sys.monitoring are for all threads.
            options |= {"nosigint": True, "skip": _SKIPPED}
            if "backend" in options:
                options["backend"] = "settrace"
        user: Any = self._line
        super().__init__(completekey, stdin or user, stdout or user, *args, **options)

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        frame = frame or sys._getframe(1)
        if self._line is None or self._line.open(_where("breakpoint", frame.f_code, frame.f_lineno)):
            super().set_trace(frame, **options)
        ActorPdb._last_pdb_instance = None

    def interaction(self, frame: FrameType | None, traceback: Any, *args: Any) -> None:
        code, line = _raised_at(traceback) if frame is None else (frame.f_code, frame.f_lineno)
        if self._line is None or self._line.open(_where("debugger", code, line)):
            super().interaction(frame, traceback, *args)
        if frame is None:
            self._leave()

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        tracing = super().dispatch_return(frame, arg)
        if not (is_ours(frame) or _yields(frame)) and (frame.f_back is None or is_ours(frame.f_back)):
            self._leave()
            self.set_continue()
        return tracing

    def _leave(self) -> None:
        if self._line is not None:
            self._line.close()

    def do_continue(self, arg: str) -> bool | None:
        self._leave()
        return bool(super().do_continue(arg))

    def do_quit(self, arg: str) -> bool | None:
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_c = do_cont = do_continue
    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - the name of the command in pdb


def _yields(frame: FrameType) -> bool:
    code, at = frame.f_code.co_code, frame.f_lasti
    if at > 0 and dis.opname[code[at]] == "RESUME":
        # Python 3.13 says where it will go on, which is the instruction behind.
        at -= 2
    return at >= 0 and dis.opname[code[at]] == "YIELD_VALUE"


def _raised_at(error: Any) -> tuple[CodeType | None, int]:
    traceback: TracebackType | None = error.__traceback__ if isinstance(error, BaseException) else error
    at: tuple[CodeType | None, int] = None, 0
    while traceback is not None:
        at, traceback = (traceback.tb_frame.f_code, traceback.tb_lineno), traceback.tb_next
    return at


def _where(what: str, code: CodeType | None, line: int) -> str:
    call = current_call.get()
    who = f"of {call.label} of {call.hosted.name}" if call is not None else "of an actor"
    at = f" at {code.co_filename}:{line}" if code is not None else ""
    return f"the {what} {who} (pid {os.getpid()}){at}"
