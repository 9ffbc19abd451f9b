"""Imported before aiodaft forks anything: sends SIGTERM to forked children before any other hook runs in them."""

from __future__ import annotations

import os
import signal

_armed = False


def _hit() -> None:
    if _armed:
        os.kill(os.getpid(), signal.SIGTERM)


def fork_a_child_that_is_terminated_at_once() -> int:
    """The end of a child that would exit with 0 if it forgot the signal: -15."""
    global _armed  # noqa: PLW0603 - the hook of the fork reads it
    _armed = True
    child = os.fork()
    if not child:
        os._exit(0)
    _armed = False
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


os.register_at_fork(after_in_child=_hit)
