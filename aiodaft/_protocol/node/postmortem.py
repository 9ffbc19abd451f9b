"""The report on a worker that ended or does not answer, from the files that the system shows of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, NamedTuple

_CGROUPS: Final = "/sys/fs/cgroup"
# The meaning of a thread's state in /proc, for a process that does not answer; the most telling state first.
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "R": "it computes, in C code that keeps the interpreter to itself",
    "D": "it waits for a device or a disk",
    "S": "it waits, in C code that keeps the interpreter to itself",
}


class Ending(NamedTuple):
    """The end of a process; both are None if that is unknown."""

    exit_code: int | None
    signal: str | None


class Activity(NamedTuple):
    """The oldest call that a worker was running, as far as this process knows.

    Attributes:
        method: The call; "" if there is none.
        seconds: For how long the call has been seen; None if it was not seen before.
    """

    method: str
    seconds: float | None

    def __str__(self) -> str:
        if not self.method:
            return "no call is known to be under way"
        return f"under way: {self.method}" + ("" if self.seconds is None else f", for {self.seconds:.1f} s or more")


def condition(states: Collection[str]) -> str:
    """Why a process does not answer, by the states of its threads."""
    return next((meaning for state, meaning in _STATES.items() if state in states), "nothing is known of it")


class OomKills:
    """Tells which killed workers the kernel killed for want of memory.

    The kernel only counts such kills per control group. So each increase of a group's count explains one death by
    SIGKILL in that group.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def watch(self, counter: str, kills: int) -> None:
        self._seen.setdefault(counter, kills)

    def take(self, counter: str, kills: int) -> bool:
        if kills <= self._seen[counter]:
            return False
        self._seen[counter] += 1
        return True


def oom_counters(groups: str) -> list[str]:
    """The files that may count the kills in the control group of a process, from the content of /proc/PID/cgroup.

    Version 2 or 1 of control groups, inside a container or not.
    """
    found: list[str] = []
    for controllers, group in re.findall(r"^\d+:(.*?):/(.*)$", groups, re.MULTILINE):
        if "memory" in controllers.split(","):
            folder, name = f"{_CGROUPS}/memory", "memory.oom_control"
        elif not controllers:
            folder, name = _CGROUPS, "memory.events"
        else:
            continue
        found += [f"{folder}/{group}/{name}", f"{folder}/{name}"]
    return found


def oom_kills(content: str) -> int:
    found = re.search(r"^oom_kill (\d+)$", content, re.MULTILINE)
    return int(found[1]) if found else 0
