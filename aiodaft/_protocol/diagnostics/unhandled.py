"""Errors that no code has handled: those that are kept, their number, and the error of a block. Pure."""

from __future__ import annotations

from typing import Final

# Errors that are kept. Each takes some 10 kB, and a server meets any number of them.
LIMIT: Final = 100


class Unhandled:
    """The unhandled errors of one block: the first ones are kept, the others are counted."""

    def __init__(self) -> None:
        self._kept: list[BaseException] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, error: BaseException) -> bool:
        """Count an error; True if it is kept. The same object counts once."""
        if any(error is known for known in self._kept):
            return False
        self._count += 1
        if len(self._kept) >= LIMIT:
            return False
        self._kept.append(error)
        return True

    def group(self, body: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """The error of a block in place of its body's; None if it raises that error, or none at all."""
        others = [error for error in self._kept if error is not body]
        if not others:
            return None
        left_out = self._count - len(self._kept)
        what = "errors in a scope" + (f" ({left_out} more were only counted)" if left_out else "")
        return BaseExceptionGroup(what, others if body is None else [body, *others])
