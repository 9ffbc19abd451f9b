"""The handles of operations of torch that are under way in a process group of aiodaft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import Work
from torch.futures import Future

from aiodaft._runtime.groups.exchanges import Exchanges
from aiodaft._runtime.groups.operations import Operation
from aiodaft.ref import Ref

# An exchange that has begun.
Begun: TypeAlias = Ref[Any] | Operation


class Handle(Work):
    """An operation.

    Args:
        exchanges: Those of the block.
        refs: Its exchanges. Each writes into the tensors of the operation when it comes.
        outputs: These tensors.
        executor: Runs code that is chained to its future, which may wait for further operations.
    """

    def __init__(self, exchanges: Exchanges, refs: Sequence[Begun], outputs: Any, executor: Executor) -> None:
        super().__init__()
        self._exchanges, self.refs, self._outputs, self._executor = exchanges, refs, outputs, executor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of it, in any thread that runs no event loop.

        Raises:
            TimeoutError: The time is over; the operation goes on.
            Exception: The error of the operation, or the reason why the block is over.
        """
        try:
            for ref in self.refs:
                ref.result(timeout.total_seconds() or None)
        except BaseException as error:
            if (why := self._exchanges.reason(error)) is error:
                raise
            raise why from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(ref.done() for ref in self.refs)

    def exception(self) -> BaseException | None:
        errors = [ref.exception() for ref in self.refs if ref.done()]
        return next((error for error in errors if error is not None), None)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if self.is_completed():
            self._settle(future)
        else:
            _when_done(list(self.refs), lambda: self._executor.submit(self._settle, future))
        return future

    def _settle(self, future: Future[Any]) -> None:
        try:
            future.set_result(self.result())
        except Exception as error:  # noqa: BLE001 - the one that waits gets it
            future.set_exception(error)


class Received(Handle):
    """A message that is received."""

    def source_rank(self) -> int:
        (ref,) = self.refs
        return int(ref.result())

    _source_rank = source_rank


def _when_done(refs: list[Begun], done: Callable[[], object]) -> None:
    if refs:
        refs.pop().add_done_callback(lambda _: _when_done(refs, done))
    else:
        done()
