"""Watches a fork server that owes an answer: whether it is stopped or stuck, or only slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodaft._protocol.node.liveness import Standstill, Verdict
from aiodaft._runtime.platform.env import Timeouts
from aiodaft._runtime.platform.linux import is_stopped, signs_of_life
from aiodaft._runtime.platform.tasks import logger


class ForkServerWatch:
    """Watches one fork server from an order until its answer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pid: Callable[[], int],
        workers: Callable[[], set[int]],
        on_lost: Callable[[str], object],
        timeouts: Timeouts,
    ) -> None:
        self._loop = loop
        # The pid of the fork server, and those of workers: their activity is not the fork server's.
        self._pid = pid
        self._workers = workers
        # Called with the reason when the fork server is given up.
        self._on_lost = on_lost
        self._timeouts = timeouts
        self._standstill = Standstill()
        self._timer: asyncio.TimerHandle | None = None
        self._reported = False
        # The module that it imports, as it has reported.
        self.importing = ""
        # Why it was given up; None again when it answers.
        self.problem: str | None = None

    def expect(self) -> None:
        """Watch it: it got an order."""
        if self._timer is None and self.problem is None:
            self._standstill = Standstill()
            self._timer = self._loop.call_later(self._timeouts.fork_server_look, self._look)

    def heard(self, *, more: bool) -> None:
        """It answered; `more` if it owes another answer."""
        if self._reported:
            logger.warning("the fork server (pid %d) answers again", self._pid())
        self.close()
        self._reported, self.problem = False, None
        if more:
            self.expect()

    def close(self) -> None:
        """Stop watching. Idempotent; needs no running loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        verdict = self._standstill.look(signs_of_life(self._pid(), self._workers()))
        if verdict is Verdict.GIVE_UP:
            self.problem = self._describe()
            self._on_lost(self.problem)
            return
        if verdict is Verdict.REPORT:
            self._reported = True
            logger.warning("actors wait for their processes: %s", self._describe())
        self._timer = self._loop.call_later(self._timeouts.fork_server_look, self._look)

    def _describe(self) -> str:
        pid, seconds = self._pid(), self._standstill.looks * self._timeouts.fork_server_look
        server = f"the fork server (pid {pid}), which starts actors, has not answered for {seconds:.0f} s"
        if is_stopped(pid):
            return f"{server}: it is stopped (SIGSTOP); continue it with `kill -CONT {pid}`"
        if self.importing:
            return (
                f"{server}: it imports {self.importing}; `py-spy dump --pid {pid}` shows where it is, and "
                "Runtime(preload=...) says which modules it imports for all actors"
            )
        return f"{server}; `py-spy dump --pid {pid}` shows where it is"
