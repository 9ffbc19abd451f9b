"""How often Python has forked this process.

A forked child has the mappings of its parent, and the kernel does not copy the pages of a file. Memory that a reader
has mapped when it forks must not be written again, because the child may read it.
"""

from __future__ import annotations

import os
from functools import cache


class ForkCount:
    """Counts forks. A program started without Python code in the child (`subprocess`) does not count."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0
        # Twice: another thread can get memory, or give it up, between the hook before the fork and the fork itself.
        os.register_at_fork(before=self._add, after_in_parent=self._add)

    def _add(self) -> None:
        self.value += 1


@cache
def fork_count() -> ForkCount:
    """The count of this process. Two values that differ say that there was a fork in between."""
    # Hooks cannot be removed, so there is one per process.
    return ForkCount()
