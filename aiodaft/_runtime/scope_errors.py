"""The errors of one scope that no code has seen: they cancel the body of its block, which raises them at its end."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from aiodaft._protocol.diagnostics.failures import Unhandled
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import CallCancelled, OutcomeUnknown, RuntimeClosed


class ScopeErrors:
    """The errors that refs and supervisors of actors report to their scope."""

    def __init__(self, controller: Owner) -> None:
        self._controller = controller
        # Set when the scope begins to close.
        self.closing = False
        self.kept = Unhandled()
        # Refs with errors that no code has seen.
        self.held: dict[RefState, None] = {}
        self._task: asyncio.Task[Any] | None = None
        self._cancelled_task = False

    def fail(self, error: BaseException, what: str) -> None:
        """Cancel the body because of an error that no code will see; the block raises the error."""
        if not self.comes_of_closing(error):
            self.kept.add(error)
            self._stop_body(error, what)

    def _stop_body(self, error: BaseException, what: str) -> None:
        if self._task is None:
            # Opened without a block.
            log_error(what, error)
        elif not self.closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        if not self.comes_of_closing(state.error):
            self.held[state] = None

    def settle(self, state: RefState) -> None:
        """Forget a ref: code has seen its error."""
        self.held.pop(state, None)

    def comes_of_closing(self, error: BaseException | None) -> bool:
        return self.closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled)

    # The block.

    def begin(self) -> None:
        self._task = asyncio.current_task()

    @property
    def has_cancelled(self) -> bool:
        return self._cancelled_task

    async def uncancel(self, error: BaseException | None) -> bool:
        """Take back the cancellation by `fail`; False if there was none, or if other code cancelled the task too."""
        if not self._cancelled_task:
            return False
        if not isinstance(error, asyncio.CancelledError):
            # The body ended before the scope's cancellation reached it: the cancellation arrives here.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                logger.debug("the scope's own cancellation arrived after its body")
        task = self._task
        return task is None or task.uncancel() == 0

    def after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """The group to raise instead of the error of the body; None: raise that error as it is."""
        for _, one in self.unseen():
            self.kept.add(one)
        return self.kept.group(None if isinstance(error, asyncio.CancelledError) else error)

    def unseen(self) -> list[tuple[str, BaseException]]:
        """The errors of refs that no code has seen, each with the name of the failed part; called once, at the end."""
        if self.held and not self._controller.is_closed:
            # A raised error refers to frames, and these to refs: only the garbage collector frees such a cycle.
            gc.collect()
            self._controller.objects.drop_now()
        # Other threads may mark errors as seen meanwhile.
        unseen = [state for state in list(self.held) if not state.seen]
        self.held = {}
        for state in unseen:
            state.seen = True
        what = "{} failed, and no code saw the error"
        return [(what.format(state.label), state.error) for state in unseen if state.error is not None]
