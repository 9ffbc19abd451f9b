"""The life of a worker process, as its node agent sees it: its heartbeats, its end, and the code that it is sent. Pure.

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
import math
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.numbers import is_number

# Whether a silent process is to be suspected or given up, judged by its heartbeats. The watcher asks once a period and
# counts the periods without an answer. A look that is late, because the watcher itself was blocked, counts as one
# period: the counted silence is never longer than the real one (except for a tenth of a period). This is a failure
# detector in the sense of Chandra and Toueg (1996), perfect where no process that lives is silent for longer than its
# patience.

# Questions also keep the lag of the loop up to date.
_LONGEST_PERIOD: Final = 1.0
_ASKED_WITHIN: Final = 5
_SHORTEST: Final = 0.1
# A loop that is blocked for so many seconds is reported, and again after pauses that double.
_STALL: Final = 1.0
_FIRST_PAUSE: Final = 5.0
# The part of a period that counts as one.
_AT_LEAST: Final = 0.9
_NUMBERS: Final = struct.Struct("<dd")
_MAX_NAME: Final = 200
_MAX_LINE: Final = 500


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that the runtime waits for a process without a sign of life, before it warns and before it kills.

    Such a process is stopped, or C code keeps its interpreter: a long sort, `json.loads`, `pickle.loads`. Busy loops
    and methods, slow imports and waiting are no silence, because a thread of the process answers meanwhile. By default
    only a stopped process is killed: C code may be healthy, however long it takes.

    Args:
        suspect_after: Seconds of silence until the first warning, from which on `rt.info` calls the actor suspect. The
            next warning comes when the silence has lasted twice as long, and so on. None for no warnings.
        lost_after: Seconds until a process is killed that is stopped (SIGSTOP, state T) and silent. Its calls fail with
            `PeerLost`. None for never.
        give_up: Seconds of silence, for any reason, until a process is killed. None for never.

    Raises:
        ValueError: Less than 0.1 seconds, or no number.
    """

    suspect_after: float | None = 5.0
    lost_after: float | None = 30.0
    give_up: float | None = None

    def __post_init__(self) -> None:
        for name in ("suspect_after", "lost_after", "give_up"):
            value: object = getattr(self, name)
            if value is not None and not is_number(value, _SHORTEST):
                raise ValueError(f"{name}={value!r}: at least {_SHORTEST} seconds are needed, or None for never")

    def widened(self, other: Patience) -> Patience:
        return Patience(*map(_longer, astuple(self), astuple(other)))

    @property
    def period(self) -> float | None:
        limits = (self.suspect_after, self.lost_after, self.give_up)
        shortest = min((after for after in limits if after is not None), default=None)
        return None if shortest is None else min(_LONGEST_PERIOD, shortest / _ASKED_WITHIN)


class Health(enum.Enum):
    ALIVE = enum.auto()
    # Its node is being drained.
    LEAVING = enum.auto()
    SUSPECT = enum.auto()
    LOST = enum.auto()


class Order(enum.Enum):
    ASK = enum.auto()
    SUSPECT = enum.auto()
    CLEAR = enum.auto()
    GIVE_UP = enum.auto()


class Answer(NamedTuple):
    lag: float = 0.0
    age: float = 0.0
    method: str = ""
    culprit: str = ""
    line: str = ""

    def pack(self) -> bytes:
        texts = f"{self.method[:_MAX_NAME]}\0{self.culprit[:_MAX_NAME]}\0{self.line[:_MAX_LINE]}"
        return _NUMBERS.pack(self.lag, self.age) + texts.encode("utf-8", "backslashreplace")

    @classmethod
    def unpack(cls, data: bytes) -> Answer | None:
        if len(data) < _NUMBERS.size:
            return None
        lag, age = _NUMBERS.unpack_from(data)
        return cls(lag, age, *data[_NUMBERS.size :].decode("utf-8", "replace").split("\0")[:3])


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """A worker when it last answered; its loop had been blocked for `loop_lag` seconds then.

    Attributes:
        last_method: The longest running call then; "" if there was none.
        last_method_for: Seconds for which that call has been seen by now.
    """

    suspect: bool = False
    silent_for: float = 0.0
    loop_lag: float = 0.0
    last_method: str = ""
    last_method_for: float = 0.0


class Liveness:
    def __init__(self, patience: Patience, now: float) -> None:
        self.health = Health.ALIVE
        self.last_heard = now
        # Once it is LOST: the part of its patience that is used up.
        self.limit = ""
        self.patience = patience
        self._due = now if patience.period is None else math.ceil(now / patience.period) * patience.period
        # Unanswered periods; how many of them found the process stopped.
        self._missed: int | None = None
        self._stopped = 0
        self._warnings = 0
        self._answer = Answer()
        self._stalls = Stalls()

    @property
    def is_silent(self) -> bool:
        """A question is unanswered: `handle_timer` needs to know whether the process is stopped."""
        return self._missed is not None

    def relax(self, patience: Patience) -> None:
        self.patience = patience
        if self._missed is not None:
            self._ask()

    def get_timer(self) -> float | None:
        return None if self.health is Health.LOST or self.patience.period is None else self._due

    def heard(self, now: float) -> Order | None:
        if self.health is Health.LOST:
            return None
        suspected = self.health is Health.SUSPECT
        self.health = Health.ALIVE
        self.last_heard = now
        self._missed = None
        return Order.CLEAR if suspected else None

    def take(self, answer: Answer, now: float) -> bool:
        """Returns True if it is time to report the code that blocks the loop."""
        self._answer = answer
        wanted = answer.line and self.patience.suspect_after is not None
        return bool(wanted) and self._stalls.is_due(answer.culprit, answer.lag, now)

    def last(self, now: float) -> LastHeartbeat:
        answer, silent_for = self._answer, now - self.last_heard
        running_for = silent_for + answer.age if answer.method else 0.0
        return LastHeartbeat(self.health is not Health.ALIVE, silent_for, answer.lag, answer.method, running_for)

    def handle_timer(self, now: float, *, stopped: bool = False) -> Order | None:
        """A period is over; `stopped` is of interest if the process is silent."""
        period = self.patience.period
        if self.health is Health.LOST or period is None or now < self._due:
            return None
        # Aligned, so that looks at all processes cost one wakeup; never much less than a period away.
        self._due = math.ceil(now / period + _AT_LEAST) * period
        if self._missed is None:
            self._ask()
            return Order.ASK
        self._missed += 1
        self._stopped = self._stopped + 1 if stopped else 0
        for limit, periods in (("lost_after", self._stopped), ("give_up", self._missed)):
            after: float | None = getattr(self.patience, limit)
            if _is_over(after, period, periods):
                self.health = Health.LOST
                self.limit = f"{limit}={after:g}"
                return Order.GIVE_UP
        suspect_after = self.patience.suspect_after
        if suspect_after is not None and _is_over(suspect_after * 2**self._warnings, period, self._missed):
            self._warnings += 1
            self.health = Health.SUSPECT
            return Order.SUSPECT
        return None

    def _ask(self) -> None:
        self._missed = self._stopped = self._warnings = 0


class Stalls:
    """Each culprit is reported again after pauses that double."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}

    def is_due(self, culprit: str, lag: float, now: float) -> bool:
        """The loop has been blocked for `lag` seconds."""
        due, pause = self._next.get(culprit, (now, _FIRST_PAUSE))
        if lag < _STALL or now < due:
            return False
        self._next[culprit] = now + pause, 2 * pause
        return True


def _is_over(after: float | None, period: float, periods: int) -> bool:
    # 5 times a fifth of a number may be less than the number.
    return after is not None and periods >= math.ceil(round(after / period, 6))


def _longer(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else max(first, second)


# A process that is stopped, or waits for ever, does not change between looks at it; a slow process does. Looks are
# counted, not seconds, so that a blocked watcher does not blame the process.

# Looks in a row without a change.
_SUSPECT: Final = 5
_LOST: Final = 30
# Looks in all, at a process that is busy and does not end.
_SLOW: Final = 60
_ENDLESS: Final = 600


class Verdict(enum.Enum):
    WAIT = enum.auto()
    REPORT = enum.auto()
    GIVE_UP = enum.auto()


class Standstill:
    def __init__(self) -> None:
        self.looks = 0
        self._unchanged = 0
        self._last: object = None

    def look(self, signs: object) -> Verdict:
        """Equal signs of life show that the process has done nothing since."""
        self.looks += 1
        self._unchanged = self._unchanged + 1 if signs == self._last else 0
        self._last = signs
        if self._unchanged >= _LOST or self.looks >= _ENDLESS:
            return Verdict.GIVE_UP
        return Verdict.REPORT if self._unchanged == _SUSPECT or self.looks == _SLOW else Verdict.WAIT


# Whether a node is silent, judged by the bytes that come from it over a connection between machines. No clock, no I/O.
#
# Each process that has a connection to a node of another machine looks at it once a period. A node runs nothing of
# users and answers at once: if it owes an answer and sends nothing, it is stopped, or its machine is, although the
# kernel there keeps the connection alive. Processes of users are not judged like this: a worker may compute for as long
# as it wants, and its own node watches it; no process waits for a controller.
#
# Since the last look                                    | Order
# something has come, or no answer is due                | nothing
# nothing has come, though an answer is due: for once    | ASK a question that each process answers at once
#     `GIVEN_UP_AFTER` times in a row                    | GIVE_UP: the connection ends, as if the network had cut it
#
# A look that is late, because the watcher was stopped or blocked, counts as one.

# So long that the keepalives of a usual lease save the questions.
PERIOD: Final = 3.0
# So a node is given up when it has been silent for 12 to 15 s.
GIVEN_UP_AFTER: Final = 4


def period_of(lease: float) -> float:
    """Others never lose patience with the coordinator sooner than the node with them."""
    return min(PERIOD, 0.3 * lease)


class Silence:
    def __init__(self) -> None:
        self._received = 0
        self._silent_looks = 0

    def look(self, received: int, *, awaited: bool) -> Order | None:
        """A period is over; `received`: bytes that have come since the beginning."""
        if received != self._received or not awaited:
            self._received, self._silent_looks = received, 0
            return None
        self._silent_looks += 1
        if self._silent_looks == GIVEN_UP_AFTER:
            return Order.GIVE_UP
        return Order.ASK if self._silent_looks == 1 else None


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
