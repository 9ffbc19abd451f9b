"""Order and concurrency of one actor's calls. Pure: it says what may start, somebody else starts it.

The rule: calls of one caller *start* in the order in which they were made, also when an earlier one still waits
for its arguments. Different callers do not hold each other up. `ordered=False` opts out.

`def` methods run on the actor's one thread, `async def` ones on the loop; each of the two takes its calls up in
order. Where a caller's calls change from one to the other, the later one waits until the earlier one has begun; so it
does after a row, which has begun when the last of its calls has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .call import GONE, QUEUED, Stage
from .ids import PeerId


@dataclass(frozen=True, slots=True)
class Rules:
    """What the mailbox needs to know of a method."""

    name: str
    on_thread: bool = False
    ordered: bool = True
    concurrency: int | None = None
    # Calls of this method that may wait at one actor.
    max_queue: int | None = None
    # Several calls of a graph that run one after the other.
    row: bool = False


class Entry(Protocol):
    """A call, as the mailbox sees it."""

    caller: PeerId
    rules: Rules
    # See `Life`.
    stage: Stage
    behind: bool
    begun: bool
    last_begun: bool


EntryT = TypeVar("EntryT", bound=Entry)


class Mailbox(Generic[EntryT]):
    """Decides when each call of one actor starts."""

    def __init__(self) -> None:
        self._lanes: dict[PeerId, deque[EntryT]] = {}
        self._unordered: deque[EntryT] = deque()
        # The call of each caller that was started last.
        self._last: dict[PeerId, EntryT] = {}
        self._running: Counter[str] = Counter()
        self._held = 0
        # Something waits for a call to begin: whoever runs it then has to say so.
        self.watching = False

    @property
    def holds_some(self) -> bool:
        """Whether calls wait for their turn."""
        return bool(self._lanes or self._unordered)

    @property
    def queued(self) -> int:
        """The number of calls that wait for their turn."""
        return len(self.waiting())

    def waiting(self) -> list[EntryT]:
        """The calls that wait for their turn."""
        waiting = [*(entry for lane in self._lanes.values() for entry in lane), *self._unordered]
        return [entry for entry in waiting if entry.stage not in GONE]

    def arrive(self, entry: EntryT) -> bool:
        """A call came in: True if it starts now, else it is kept."""
        rules = entry.rules
        caller = entry.caller
        if (
            rules.ordered
            and rules.concurrency is None
            and entry.stage is QUEUED
            and not (self._lanes or self._held or caller in self._last)
        ):
            # The usual case, and what `_may_start` and `_start` come to: there is nothing that it might wait for.
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
        return False

    def finished(self, entry: EntryT) -> bool:
        """A started call ended: True if others wait, so that one of them may be `startable` now."""
        rules = entry.rules
        if self._last.get(entry.caller) is entry:
            del self._last[entry.caller]
        if rules.concurrency is not None:
            self._running[rules.name] -= 1
        # What `holds_some` says; on the path of every call.
        return bool(self._lanes or self._unordered)

    def hold(self) -> None:
        """Start nothing until `unhold`: a result is being captured, and no call may change it meanwhile."""
        self._held += 1

    def unhold(self) -> None:
        """The result is captured: calls may be `startable` now."""
        self._held -= 1

    def startable(self) -> Iterator[EntryT]:
        """Take out what may start now, one after the other: a call became ready, was withdrawn, or has begun.

        Whoever gets one starts it before the next: what it does with its first line (it makes calls, or holds the
        mailbox) counts for those behind it.
        """
        self.watching = False
        for caller, lane in list(self._lanes.items()):
            first = lane[0]
            while lane and (lane[0].stage in GONE or self._may_start(lane[0])):
                entry = lane.popleft()
                if entry.stage not in GONE:
                    self._start(entry)
                    yield entry
            if not lane:
                del self._lanes[caller]
            elif first is not lane[0]:
                # Whoever got something goes behind the others, or it could take every turn of a bounded method.
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
        """The calls of which one has to move on before a call that waits here may start.

        Args:
            entry: The call.
            running: Gives the calls that have started and not ended.

        Returns:
            Them; nothing if it waits for something else, or for a call that is not among `running`.
        """
        rules = entry.rules
        lane = self._lanes.get(entry.caller) if rules.ordered else None
        if lane and lane[0] is not entry:
            return [lane[0]]
        if entry.stage is not QUEUED or self._held:
            return []
        if rules.concurrency is not None and self._running[rules.name] >= rules.concurrency:
            same = [other for other in running() if other.rules.name == rules.name]
            return same if len(same) >= rules.concurrency else []
        last = self._last.get(entry.caller) if rules.ordered else None
        return [last] if last is not None and not last.begun and last.rules.on_thread is not rules.on_thread else []

    def in_the_way(self, running: Callable[[], Sequence[EntryT]]) -> list[EntryT]:
        """The calls for which others here wait directly."""
        found: list[EntryT] = []
        names: set[str] = set()
        for lane in self._lanes.values():
            if len(lane) > 1 and lane[0].stage is not QUEUED:
                found.append(lane[0])
            found += self.ahead_of(lane[0], running)
        for entry in self._unordered:
            # What one waits for, all of that method wait for.
            if entry.stage is QUEUED and entry.rules.name not in names:
                names.add(entry.rules.name)
                found += self.ahead_of(entry, running)
        return found

    def drain(self) -> list[EntryT]:
        """Take out everything that waits: it will never start."""
        waiting = self.waiting()
        self._lanes.clear()
        self._unordered.clear()
        return waiting

    def _may_start(self, entry: EntryT) -> bool:
        rules = entry.rules
        if entry.stage is not QUEUED or self._held:
            return False
        if rules.concurrency is not None and self._running[rules.name] >= rules.concurrency:
            return False
        if not rules.ordered:
            return True
        last = self._last.get(entry.caller)
        if last is None:
            return True
        # What runs on the same side is taken up in order, so the last one speaks for all before it.
        if last.rules.on_thread is rules.on_thread and (rules.on_thread or not last.rules.row):
            return True
        # First ask to be told, then look: the other way round, it could begin in between and never say so.
        self.watching = True
        return last.last_begun if last.rules.row else last.begun

    def _start(self, entry: EntryT) -> None:
        rules = entry.rules
        if rules.ordered:
            last = self._last.get(entry.caller)
            entry.behind = last is not None and not last.begun
            self._last[entry.caller] = entry
        if rules.concurrency is not None:
            self._running[rules.name] += 1


class BoundedMailbox(Mailbox[EntryT]):
    """A mailbox in which only so many calls may wait. Steps of graphs, which are not admitted one by one, do not count.

    Calls wait until they start: for their turn, for their arguments, or for the actor's thread. The oldest call that
    was handed to the thread has it, or is about to get it, and does not wait.
    """

    def __init__(self, max_queue: int | None) -> None:
        super().__init__()
        self._max_queue = max_queue
        # Admitted calls that are bounded and may still wait, in the order in which they came.
        self._queue: dict[EntryT, None] = {}
        # Calls that were handed to the thread and have not ended.
        self._on_thread: dict[EntryT, None] = {}

    def admit(self, entry: EntryT) -> str | None:
        """Count a call that came in, before it is told to `arrive`; or say why it is refused."""
        first = next((other for other in self._on_thread if other.stage not in GONE), None)
        self._queue = {other: None for other in self._queue if other.stage not in GONE}
        waiting = [other.rules.name for other in self._queue if other is not first and not other.begun]
        most, of_method = self._max_queue, entry.rules.max_queue
        if most is not None and len(waiting) >= most:
            return f"{len(waiting)} calls wait there already, and max_queue={most}"
        if of_method is not None and waiting.count(entry.rules.name) >= of_method:
            return (
                f"{waiting.count(entry.rules.name)} calls of this method wait there already, and max_queue={of_method}"
            )
        if most is not None or of_method is not None:
            self._queue[entry] = None
        return None

    def arrive(self, entry: EntryT) -> bool:
        starts = super().arrive(entry)
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


def check_max_queue(max_queue: object, what: str) -> int | None:
    """How many calls may wait; None if that is not bounded.

    Raises:
        ValueError: It is no positive integer.
    """
    if max_queue is None:
        return None
    if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
        raise ValueError(f"{what}: `max_queue` is a positive integer, not {max_queue!r:.80}")
    return max_queue
