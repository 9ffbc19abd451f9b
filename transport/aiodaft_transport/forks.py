"""Counts how often Python has forked this process.

A forked child has the mappings of its parent, and the kernel does not copy the pages of a file. If a reader forks, the
memory that it has mapped must not be written again, because the child may read it.
"""

from __future__ import annotations

import os
from functools import cache


class ForkCount:
    """Counts forks. Children that run no Python code before exec (`subprocess`) do not count."""

    value = 0

    def __init__(self) -> None:
        # Twice: another thread can map or unmap memory between the first hook and the fork itself.
        os.register_at_fork(before=self._add, after_in_parent=self._add)

    def _add(self) -> None:
        self.value += 1


@cache
def fork_count() -> ForkCount:
    """The count of this process. If it has changed, the process has forked."""
    # Hooks cannot be removed, so there is one per process.
    return ForkCount()
