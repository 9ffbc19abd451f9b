"""The life, order and concurrency of one actor's calls. Pure: it decides which calls may start;
the hosted actor starts them.

Calls of one caller *start* in the order in which they were made, also when an earlier one still waits for its
arguments. Different callers do not block each other. `ordered=False` opts out.

`def` methods run on the actor's one thread, `async def` methods on the loop; each of the two begins its calls in
order. If two successive calls of a caller run on different ones, the later call waits until the earlier one has begun.
A call after a segment (see `Rules.segment`) waits until the last call of the segment has begun.

A call with a `Gate` also waits for that. The gate decides about the order of such calls of a caller that come in a row.

    FETCHING --FETCHED--> QUEUED --START--> STARTED --ANSWER--> OVER
        |                    |                 |
        +------WITHDRAW------+-----------------+---> WITHDRAWN --ANSWER--> OVER
                                               |
                                               +-CANCEL-> CANCELLED --EXPIRE--> LATE
                                                              |                  |
                                                              +------ANSWER------+--> ABANDONED

The loop changes the stage; the task or thread that runs the call sets `begun`. A thread may begin a call just when the
loop withdraws it, so each of them first has to claim the call.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.numbers import is_count


class Stage(Enum):
    FETCHING = "its arguments are being fetched"
    QUEUED = "it waits for its turn in the mailbox"
    STARTED = "its task or thread has it"
    CANCELLED = "it has begun, and was told to stop; its caller waits for its end"
    LATE = "its deadline passed after it had begun; its caller waits for its cleanup"
    WITHDRAWN = "it will never begin; its caller is about to be told"
    ABANDONED = "it still runs, but its caller has its answer, or is gone"
    OVER = "it is answered, and has ended or will never begin"

    # Faster than that of Enum.
    __hash__ = object.__hash__


class Event(Enum):
    FETCHED = "its arguments are here"
    START = "the mailbox lets it start"
    WITHDRAW = "before it began, it was cancelled or its arguments failed"
    CANCEL = "it was cancelled after it had begun"
    EXPIRE = "its deadline passed after it had begun"
    ANSWER = "its caller gets a result or an error, or is gone"

    __hash__ = object.__hash__


FETCHING, QUEUED, STARTED, CANCELLED, LATE, WITHDRAWN, ABANDONED, OVER = Stage
FETCHED, START, WITHDRAW, CANCEL, EXPIRE, ANSWER = Event

# Other events come too late: there is one answer, and the first cancellation counts.
NEXT: Final = {
    FETCHED: {FETCHING: QUEUED},
    START: {QUEUED: STARTED},
    # Its arguments or its turn may never come; or its task or thread does not run it.
    WITHDRAW: {FETCHING: WITHDRAWN, QUEUED: WITHDRAWN, STARTED: WITHDRAWN},
    CANCEL: {STARTED: CANCELLED},
    # The deadline starts the grace time anew, also if the call was cancelled before.
    EXPIRE: {CANCELLED: LATE},
    ANSWER: {
        # A stopped actor refuses the calls that wait.
        FETCHING: OVER,
        QUEUED: OVER,
        WITHDRAWN: OVER,
        STARTED: OVER,
        # The call ends; or its grace time is over; or it runs on a thread, which cannot be interrupted.
        CANCELLED: ABANDONED,
        LATE: ABANDONED,
    },
}

ONWARD: Final = NEXT[START]

WANTED: Final = frozenset({FETCHING, QUEUED, STARTED})
# It was not handed to its task or thread.
WAITING: Final = frozenset({FETCHING, QUEUED})
# The mailbox drops it.
GONE: Final = frozenset({WITHDRAWN, OVER})
# It has begun, and its result is not wanted.
GIVEN_UP: Final = frozenset({CANCELLED, LATE, ABANDONED})
ANSWERED: Final = frozenset({ABANDONED, OVER})


class Life:
    stage = QUEUED
    # An earlier call had not begun when this one was started: this one has to begin after it.
    behind = False
    # `begun`: its first line has run. `last_begun`: the first line of the last step of a segment has run.
    begun = False
    last_begun = False
    gate: Any = None
    dropped = False
    deadline: float | None = None
    since = 0.0
    # While a trace is recorded.
    came: float | None = None
    complete: float | None = None
    ended: float | None = None
    outcome = ""

    def handle(self, event: Event) -> bool:
        after = NEXT[event].get(self.stage)
        if after is None:
            return False
        self.stage = after
        return True

    @property
    def given_up(self) -> bool:
        return self.stage in GIVEN_UP

    @property
    def answered(self) -> bool:
        return self.stage in ANSWERED


EntryT_contra = TypeVar("EntryT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Rules:
    name: str
    on_thread: bool = False
    ordered: bool = True
    concurrency: int | None = None
    max_queue: int | None = None
    segment: bool = False


class Gate(Protocol[EntryT_contra]):
    def admits(self, entry: EntryT_contra, /) -> bool:
        """If not, the user of the mailbox asks for `startable` once it may."""
        ...

    def began(self, entry: EntryT_contra, /) -> None: ...


class Entry(Protocol):
    caller: PeerId
    rules: Rules
    stage: Stage
    behind: bool
    begun: bool
    last_begun: bool
    gate: Gate[Any] | None


EntryT = TypeVar("EntryT", bound=Entry)

_ASKED_AT_ONCE: Final = 32


class Mailbox(Generic[EntryT]):
    """Decides when each call of one actor starts."""

    def __init__(self) -> None:
        self._lanes: dict[PeerId, deque[EntryT]] = {}
        self._unordered: deque[EntryT] = deque()
        self._last: dict[PeerId, EntryT] = {}
        self._running: Counter[str] = Counter()
        # The hosted actor asks for `startable` when a call begins.
        self.watching = False

    @property
    def holds_some(self) -> bool:
        return bool(self._lanes or self._unordered)

    @property
    def queued(self) -> int:
        return len(self.waiting())

    def waiting(self) -> list[EntryT]:
        waiting = [*(entry for lane in self._lanes.values() for entry in lane), *self._unordered]
        return [entry for entry in waiting if entry.stage not in GONE]

    def arrive(self, entry: EntryT) -> bool:
        rules = entry.rules
        caller = entry.caller
        if (
            rules.ordered
            and rules.concurrency is None
            and entry.stage is QUEUED
            and entry.gate is None
            and not (self._lanes or caller in self._last)
        ):
            self._last[caller] = entry
            return True
        lane = self._lanes.get(caller) if rules.ordered and self._lanes else None
        if lane is None and self._may_start(entry):
            self._start(entry)
            return True
        if not rules.ordered:
            self._unordered.append(entry)
        elif lane is None:
            self._lanes[caller] = deque([entry])
        else:
            lane.append(entry)
            if entry.gate is not None:
                # It is asked early; whether the call may start, `startable` finds.
                _let_gates_decide(lane)
        return False

    def take_ready(self, entry: EntryT) -> bool:
        if not entry.rules.ordered:
            if not self._may_start(entry):
                return False
            self._unordered.remove(entry)
            self._start(entry)
            return True
        caller = entry.caller
        lane = self._lanes.get(caller)
        if lane is None or len(self._lanes) > 1 or len(lane) > 1 or self._unordered or not self._may_start(entry):
            return False
        del self._lanes[caller]
        self._start(entry)
        return True

    def finished(self, entry: EntryT) -> bool:
        rules = entry.rules
        if self._last.get(entry.caller) is entry:
            del self._last[entry.caller]
        if rules.concurrency is not None:
            self._running[rules.name] -= 1
        # Without order, a call waits for others only if its method has a limit.
        return bool(self._lanes or (self._unordered and rules.concurrency is not None))

    def startable(self) -> Iterator[EntryT]:
        """Take out the calls that may start now, after a call became ready, was withdrawn, or has begun.

        The user of the iterator starts each call before it takes the next: the first line of the call may make
        calls, and this affects the next ones.
        """
        self.watching = False
        for caller, lane in list(self._lanes.items()):
            _let_gates_decide(lane)
            first = lane[0]
            while lane and (lane[0].stage in GONE or self._may_start(lane[0])):
                entry = lane.popleft()
                if entry.stage not in GONE:
                    self._start(entry)
                    yield entry
            if not lane:
                del self._lanes[caller]
            elif first is not lane[0]:
                # Its caller goes behind the others, or it could take every free place of a bounded method.
                self._lanes[caller] = self._lanes.pop(caller)
        for _ in range(len(self._unordered)):
            entry = self._unordered.popleft()
            if entry.stage in GONE:
                continue
            if self._may_start(entry):
                self._start(entry)
                yield entry
            else:
                self._unordered.append(entry)

    def ahead_of(self, entry: EntryT, running: Callable[[], Sequence[EntryT]]) -> list[EntryT]:
        """The calls that block a waiting call: one of them has to progress first.

        Empty if it waits for something else, or for a call that is not among `running`, the started and not ended ones.
        """
        rules = entry.rules
        lane = self._lanes.get(entry.caller) if rules.ordered else None
        if lane and lane[0] is not entry:
            return [lane[0]]
        if entry.stage is not QUEUED:
            return []
        if rules.concurrency is not None and self._running[rules.name] >= rules.concurrency:
            same = [other for other in running() if other.rules.name == rules.name]
            return same if len(same) >= rules.concurrency else []
        last = self._has_to_follow(entry) if rules.ordered else None
        return [] if last is None or _has_begun(last) else [last]

    def in_the_way(self, running: Callable[[], Sequence[EntryT]]) -> list[EntryT]:
        found: list[EntryT] = []
        names: set[str] = set()
        for lane in self._lanes.values():
            if len(lane) > 1 and lane[0].stage is not QUEUED:
                found.append(lane[0])
            found += self.ahead_of(lane[0], running)
        for entry in self._unordered:
            if entry.stage is QUEUED and entry.rules.name not in names:
                names.add(entry.rules.name)
                found += self.ahead_of(entry, running)
        return found

    def drain(self) -> list[EntryT]:
        waiting = self.waiting()
        self._lanes.clear()
        self._unordered.clear()
        return waiting

    def _may_start(self, entry: EntryT) -> bool:
        rules = entry.rules
        if entry.stage is not QUEUED:
            return False
        if rules.concurrency is not None and self._running[rules.name] >= rules.concurrency:
            return False
        last = self._has_to_follow(entry) if rules.ordered else None
        if last is not None:
            # Set the flag before the look: otherwise a call that begins in between would go unnoticed.
            self.watching = True
            if not _has_begun(last):
                return False
        return entry.gate is None or entry.gate.admits(entry)

    def _has_to_follow(self, entry: EntryT) -> EntryT | None:
        """The last started call of the same caller, if that has to begin first."""
        last, rules = self._last.get(entry.caller), entry.rules
        # The thread, and the loop, begin calls in order: if the last one has begun, all before it have.
        if last is None or (last.rules.on_thread is rules.on_thread and (rules.on_thread or not last.rules.segment)):
            return None
        return last

    def _start(self, entry: EntryT) -> None:
        rules = entry.rules
        if rules.ordered:
            last = self._last.get(entry.caller)
            entry.behind = last is not None and not last.begun
            self._last[entry.caller] = entry
        if rules.concurrency is not None:
            self._running[rules.name] += 1
        if entry.gate is not None:
            entry.gate.began(entry)


def _let_gates_decide(lane: deque[EntryT]) -> None:
    """Put the first call of a lane that may start before the others."""
    for index, entry in enumerate(islice(lane, _ASKED_AT_ONCE)):
        if entry.stage in GONE:
            continue
        if entry.gate is None or entry.stage is not QUEUED:
            return
        if entry.gate.admits(entry):
            if index:
                del lane[index]
                lane.appendleft(entry)
            return


def _has_begun(entry: Entry) -> bool:
    """Whether a started call has begun; of several steps, the last one."""
    return entry.last_begun if entry.rules.segment else entry.begun


class BoundedMailbox(Mailbox[EntryT]):
    """A mailbox with a limit of waiting calls. Steps of graphs do not count: they are not admitted one by one.

    Calls wait for their turn, for their arguments, or for the actor's thread. The oldest call that was handed to the
    thread runs, or is about to run, and does not count as waiting.
    """

    def __init__(self, max_queue: int | None) -> None:
        super().__init__()
        self._max_queue = max_queue
        self._queue: dict[EntryT, None] = {}
        self._on_thread: dict[EntryT, None] = {}

    def admit(self, entry: EntryT) -> str | None:
        """Returns the reason if the call is refused."""
        first = next((other for other in self._on_thread if other.stage not in GONE), None)
        self._queue = {other: None for other in self._queue if other.stage not in GONE}
        waiting = [other.rules.name for other in self._queue if other is not first and not other.begun]
        most, of_method = self._max_queue, entry.rules.max_queue
        if most is not None and len(waiting) >= most:
            return f"max_queue={most}, and so many calls wait there already"
        if of_method is not None and waiting.count(entry.rules.name) >= of_method:
            return f"max_queue={of_method}, and so many calls of this method wait there already"
        if most is not None or of_method is not None:
            self._queue[entry] = None
        return None

    def arrive(self, entry: EntryT) -> bool:
        starts = super().arrive(entry)
        if starts:
            self._started(entry)
        return starts

    def take_ready(self, entry: EntryT) -> bool:
        starts = super().take_ready(entry)
        if starts:
            self._started(entry)
        return starts

    def startable(self) -> Iterator[EntryT]:
        for entry in super().startable():
            self._started(entry)
            yield entry

    def finished(self, entry: EntryT) -> bool:
        self._queue.pop(entry, None)
        self._on_thread.pop(entry, None)
        return super().finished(entry)

    def _started(self, entry: EntryT) -> None:
        if entry.rules.on_thread:
            self._on_thread[entry] = None
        else:
            self._queue.pop(entry, None)


def check_concurrency(concurrency: object, what: str, *, on_thread: bool) -> None:
    """Raises TypeError: the method runs on the actor's thread. ValueError: it is not a positive integer."""
    if concurrency is None:
        return
    if on_thread:
        raise TypeError(f"{what}: `concurrency` is for async def; def methods run one at a time anyway")
    if not is_count(concurrency):
        raise ValueError(f"{what}: `concurrency` is a positive integer, not {concurrency!r:.80}")


def check_max_queue(max_queue: object, what: str) -> int | None:
    if max_queue is None:
        return None
    if not is_count(max_queue):
        raise ValueError(f"{what}: `max_queue` is a positive integer, not {max_queue!r:.80}")
    return max_queue
