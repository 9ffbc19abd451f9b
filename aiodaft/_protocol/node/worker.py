"""The life of a worker process, as its node agent sees it, and the code that it is sent. Pure.

An accident is an end that the runtime did not order. Its error goes to the callers with calls under way; without any,
the node agent waits a while for reports of callers, and then gives the error to the scope of the actors.

    STARTING --STARTED--> UP --ENDED--> DIED --BLAME_OVER--> UNHANDLED
                          |  ^           |
               CALLS_LOST |  | ALIVE     | CALLS_LOST
                          v  |           v
                        BLAMED -ENDED-> OVER <--ENDED-- STOPPING
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from aiodaft._protocol.ids import PeerId


class WorkerState(enum.Enum):
    STARTING = "the fork server makes it"
    UP = "it runs"
    BLAMED = "it runs, as far as is known; calls failed because a connection to it was lost"
    STOPPING = "it was told to end"
    DIED = "it ended by accident, and no failed call is known yet"
    UNHANDLED = "it ended by accident, and no call failed: the scope gets the error"
    OVER = "it ended"


class WorkerEvent(enum.Enum):
    STARTED = "the fork server has made it"
    CALLS_LOST = "another process lost its connection to it, with calls under way"
    ALIVE = "the loss of a connection was not its end"
    STOP = "it is told to end, or killed, because its actors are stopped"
    ENDED = "it ended"
    BLAME_OVER = "the time for callers to report lost calls is over"


_S: Final = WorkerState
_E: Final = WorkerEvent
_WATCHED: Final = (_S.STARTING, _S.UP, _S.BLAMED)

_AFTERWARDS: Final = (_E.STARTED, _E.CALLS_LOST, _E.ALIVE, _E.STOP)

TRANSITIONS: Final[dict[tuple[WorkerState, WorkerEvent], WorkerState]] = {
    (_S.STARTING, _E.STARTED): _S.UP,
    (_S.STARTING, _E.ENDED): _S.DIED,
    (_S.UP, _E.ENDED): _S.DIED,
    # The callers have the error.
    (_S.BLAMED, _E.ENDED): _S.OVER,
    (_S.STARTING, _E.CALLS_LOST): _S.BLAMED,
    (_S.UP, _E.CALLS_LOST): _S.BLAMED,
    (_S.BLAMED, _E.CALLS_LOST): _S.BLAMED,
    # The calls failed only because of the connection: a later end is another accident.
    (_S.BLAMED, _E.ALIVE): _S.UP,
    (_S.UP, _E.ALIVE): _S.UP,
    (_S.STARTING, _E.ALIVE): _S.STARTING,
    # The connection may break before the fork server reports the start.
    (_S.BLAMED, _E.STARTED): _S.BLAMED,
    **{(state, _E.STOP): _S.STOPPING for state in (*_WATCHED, _S.STOPPING)},
    # The end that it was told to make is no accident.
    **{(_S.STOPPING, event): _S.STOPPING for event in (_E.STARTED, _E.CALLS_LOST, _E.ALIVE)},
    (_S.STOPPING, _E.ENDED): _S.OVER,
    (_S.DIED, _E.CALLS_LOST): _S.OVER,
    # Its spawn fails with the error.
    (_S.DIED, _E.STOP): _S.OVER,
    (_S.DIED, _E.BLAME_OVER): _S.UNHANDLED,
    (_S.OVER, _E.BLAME_OVER): _S.OVER,
    # Tasks that wait for its start, or explain a lost connection, may run after its end.
    **{(_S.DIED, event): _S.DIED for event in (_E.STARTED, _E.ALIVE)},
    **{(state, event): state for state in (_S.UNHANDLED, _S.OVER) for event in _AFTERWARDS},
}


def how_it_ended(exit_code: int | None, signal: str | None, *, oom: bool) -> str:
    """None: the end is not known."""
    if oom:
        return "was killed by the kernel (SIGKILL): out of memory"
    if signal is not None:
        return f"was killed by {signal}"
    return "ended, and its exit status is not known" if exit_code is None else f"ended with exit code {exit_code}"


# A node that is being drained: it takes no new actors, lets those that it has go, and then ends.
#
# SERVING --begin--> DRAINING --no process is left--> OVER
#                        | the grace is over           ^
#                        +-----------> EVICTING -------+


class DrainState(enum.Enum):
    SERVING = "it takes actors"
    DRAINING = "it takes no new actors, and waits until its processes have ended"
    EVICTING = "its processes are told to end, because the grace is over"
    OVER = "no process is left: the node ends"


class Drain:
    def __init__(self) -> None:
        self.state = DrainState.SERVING
        self._deadline = 0.0

    @property
    def begun(self) -> bool:
        return self.state is not DrainState.SERVING

    def begin(self, grace: float, now: float) -> None:
        """A later order counts only if it leaves less time."""
        deadline = now + grace
        if self.state is DrainState.SERVING:
            self.state, self._deadline = DrainState.DRAINING, deadline
        self._deadline = min(self._deadline, deadline)

    def left(self, now: float) -> float:
        return max(0.0, self._deadline - now)

    def step(self, processes: int, now: float) -> DrainState:
        if self.begun:
            if not processes:
                self.state = DrainState.OVER
            elif self.state is DrainState.DRAINING and not self.left(now):
                self.state = DrainState.EVICTING
        return self.state


def describe(actors: Sequence[str], placed: str, pid: int, owner: str) -> str:
    return f"{', '.join(actors) or f'the process of {placed}'} (pid {pid}, of {owner})"


_CGROUPS: Final = "/sys/fs/cgroup"
# The most telling state first.
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "R": "it computes, in C code that keeps the interpreter to itself",
    "D": "it waits for a device or a disk",
    "S": "it waits, in C code that keeps the interpreter to itself",
}


class Ending(NamedTuple):
    exit_code: int | None
    signal: str | None


class Activity(NamedTuple):
    """The oldest call that a worker was running, as far as this process knows; `seconds`: for how long it was seen."""

    method: str
    seconds: float | None

    def __str__(self) -> str:
        if not self.method:
            return "no call is known to be under way"
        return f"under way: {self.method}" + ("" if self.seconds is None else f", for {self.seconds:.1f} s or more")


def condition(states: Collection[str]) -> str:
    return next((meaning for state, meaning in _STATES.items() if state in states), "nothing is known of it")


class OomKills:
    """The kernel only counts such kills per control group: each increase explains one death by SIGKILL in the group."""

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
    """From the content of /proc/PID/cgroup: version 2 or 1 of control groups, inside a container or not."""
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


MAX_FILES: Final = 10_000
MAX_BYTES: Final = 64 << 20


class Code(NamedTuple):
    source: PeerId
    digests: tuple[str, ...] = ()


class File(NamedTuple):
    path: str
    executable: bool
    content: bytes


def check_files(files: Sequence[File]) -> None:
    """Raises ValueError: files exceed a limit, or a path leads out of the folder that they are unpacked to."""
    if len(files) > MAX_FILES or sum(len(file.content) for file in files) > MAX_BYTES:
        raise ValueError(f"an archive of code has at most {MAX_FILES:,} files and {MAX_BYTES:,} bytes")
    for path, _, _ in files:
        if "\0" in path or {"", ".", ".."} & set(path.split("/")):
            raise ValueError(f"{path!r:.200} does not lie in the folder of the archive")


def digest_of(archive: bytes) -> str:
    from hashlib import sha256  # noqa: PLC0415 - takes long to import, and few programs send code

    return sha256(archive).hexdigest()
