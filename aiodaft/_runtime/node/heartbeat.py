"""Heartbeats of a worker, over a socket of its own: the node asks once a period, and a thread answers.

The thread also answers while the loop, a method or an import is busy. It is silent only if the process is stopped, or C
code holds the GIL; `_protocol/node/liveness.py` decides what follows from that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, PeerId
from aiodaft._protocol.node.liveness import Answer, LastHeartbeat, Liveness, Order, Patience
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.diagnostics.debugger_line import is_debugged
from aiodaft._runtime.diagnostics.wait_graph import on_loop

_QUESTION: Final = b"?"
_MAX_ANSWER: Final = 1 << 12


class Heartbeat:
    def __init__(self, connection: socket.socket, host: Host) -> None:
        """Created in the thread of the process's loop."""
        self._connection = connection
        self._process = host.process
        self._host = host
        self._loop_thread = threading.get_ident()
        self._lag = 0.0
        # When a callback was scheduled on the loop; None once it has run.
        self._asked: float | None = None
        # The longest running call, as its caller and number, and when it was first seen.
        self._oldest: tuple[PeerId, CallId] | None = None
        self._name = ""
        self._since = 0.0

    def start(self) -> None:
        threading.Thread(target=self._answer_all, name="aiodaft heartbeat", daemon=True).start()

    def _answer_all(self) -> None:
        with suppress(OSError):
            while self._connection.recv(len(_QUESTION)):
                self._connection.send(self._answer(self._process.env.monotonic()))

    def _answer(self, now: float) -> bytes:
        culprit = line = ""
        if self._asked is None:
            self._asked = now
            self._process.call_soon(self._turned)
        else:
            self._lag = now - self._asked
            culprit, line = ("", "") if is_debugged() else self._find_culprit()
        # Raised if the loop changes its calls at this moment, and so is not blocked.
        with suppress(RuntimeError):
            call = next((call for call in self._host.calls() if _runs(call)), None)
            key = None if call is None else (call.caller, call.number)
            if key != self._oldest:
                self._oldest, self._name, self._since = key, "" if call is None else call.label, now
        name = f"{self._name} (in the debugger)" if is_debugged() else self._name
        return Answer(self._lag, now - self._since, name, culprit, line).pack()

    def _find_culprit(self) -> tuple[str, str]:
        """The call that blocks the loop and the line where it does so, if that is user code."""
        call, line = on_loop(self._loop_thread)
        if call is None:
            return "", line
        if call.hosted.id < FIRST_USER_ACTOR:
            # The agent makes an actor: imports may take long.
            return "", ""
        return f"{call.label} of {call.hosted.name}", line

    def _turned(self) -> None:
        if self._asked is not None:
            self._lag = self._process.env.monotonic() - self._asked
            self._asked = None


class HeartbeatWatch:
    def __init__(
        self, connection: socket.socket, loop: asyncio.AbstractEventLoop, is_stopped: Callable[[int], bool]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = loop
        self.is_stopped = is_stopped
        # Until `begin`, silence is no matter.
        self.liveness = Liveness(Patience(None, None), loop.time())
        self._pid = 0
        self._timer: asyncio.TimerHandle | None = None
        # Called with the call that blocks the loop ("" for another task or callback), its line, and the seconds.
        self.on_stall: Callable[[str, str, float], object] = lambda culprit, line, seconds: None
        # Called to report that the process is suspect, is not any more, or is to be given up.
        self.on_order: Callable[[Order], object] = lambda order: None

    def begin(self, patience: Patience, pid: int) -> None:
        self._pid = pid
        self.liveness = Liveness(patience, self._loop.time())
        self._look()

    def widen(self, patience: Patience) -> None:
        self.liveness.relax(self.liveness.patience.widened(patience))
        self._schedule()

    def last(self) -> LastHeartbeat:
        return self.liveness.last(self._loop.time())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection.close()

    def _look(self) -> None:
        # Answers are read only here: so they cost no wakeup, and one that came while this loop was busy counts.
        self._read_answer()
        stopped = self.liveness.is_silent and self.is_stopped(self._pid)
        order = self.liveness.handle_timer(self._loop.time(), stopped=stopped)
        if order is Order.ASK:
            # The connection reports the end of the process.
            with suppress(OSError):
                self._connection.send(_QUESTION)
        elif order is not None:
            self.on_order(order)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.liveness.get_timer()
        if due is not None and self._connection.fileno() >= 0:
            self._timer = self._loop.call_at(due, self._look)

    def _read_answer(self) -> None:
        try:
            answer = Answer.unpack(self._connection.recv(_MAX_ANSWER))
        except OSError:
            return
        if answer is None:
            # It ends, or breaks the protocol; either counts as silence.
            return
        now = self._loop.time()
        if self.liveness.take(answer, now):
            self.on_stall(answer.culprit, answer.line, answer.lag)
        order = self.liveness.heard(now)
        if order is not None:
            self.on_order(order)


def _runs(call: InboundCall) -> bool:
    return call.begun and call.hosted.id >= FIRST_USER_ACTOR
