"""The operating system's services for transports, and substitutes where these are missing."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final

_ONE: Final = (1).to_bytes(8, "little")
_READ_SIZE: Final = 4096


def shares_memory() -> bool:
    """Whether processes can pass memory without a name to each other, of which no process can shrink the other's."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(fcntl, "F_ADD_SEALS")


def usable_cpus() -> int:
    """The CPUs that this process may run on, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        OSError: The system refuses it: EAGAIN.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread


class Doorbell:
    """Wakes a thread that waits for descriptors. Owns its descriptors: one where there are eventfds, else a pipe."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._button = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._button = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._button, False)

    def ring(self) -> None:
        # A pipe may be full: then it is readable.
        with suppress(BlockingIOError):
            os.write(self._button, _ONE)

    def heard(self) -> None:
        os.read(self.fd, _READ_SIZE)

    def close(self) -> None:
        for fd in {self.fd, self._button}:
            os.close(fd)


# Counts how often Python has forked this process.
#
# A forked child has the mappings of its parent, and the kernel does not copy the pages of a file. If a reader forks,
# the memory that it has mapped must not be written again, because the child may read it.


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
