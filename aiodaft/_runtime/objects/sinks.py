"""Where errors go that nobody awaits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiodaft._runtime.objects.ref_state import RefState


class ErrorSink(Protocol):
    """A scope, as the refs of its actors see it."""

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code saw, and what has failed."""
        ...

    def hold(self, state: RefState) -> None:
        """An error that waits in a ref: raised when the scope ends, unless somebody looks at it before."""
        ...

    def settle(self, state: RefState) -> None:
        """Somebody looked at a held error."""
        ...
