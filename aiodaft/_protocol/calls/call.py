"""The life of a call at the actor that runs it. Pure.

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

from enum import Enum
from typing import Any, Final


class Stage(Enum):
    FETCHING = "its arguments are being fetched"
    QUEUED = "it waits for its turn in the mailbox"
    STARTED = "its task or thread has it"
    CANCELLED = "it has begun, and was told to stop; its caller waits for its end"
    LATE = "its deadline passed after it had begun; its caller waits for its cleanup"
    WITHDRAWN = "it will never begin; its caller is about to be told"
    ABANDONED = "it still runs, but its caller has its answer, or is gone"
    OVER = "it is answered, and has ended or will never begin"

    # Faster than that of Enum, for the look-ups of each call.
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

# By event. Other events come too late, and change nothing: there is one answer, and the first cancellation counts.
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

# The stage of a call after its start, on the path of each call.
ONWARD: Final = NEXT[START]

# The call is to run to its end.
WANTED: Final = frozenset({FETCHING, QUEUED, STARTED})
# It was not handed to its task or thread.
WAITING: Final = frozenset({FETCHING, QUEUED})
# The mailbox drops it.
GONE: Final = frozenset({WITHDRAWN, OVER})
# It has begun, and its result is not wanted.
GIVEN_UP: Final = frozenset({CANCELLED, LATE, ABANDONED})
ANSWERED: Final = frozenset({ABANDONED, OVER})


class Life:
    # Most calls bring their arguments along.
    stage = QUEUED
    # An earlier call had not begun when this one was started: this one has to begin after it.
    behind = False
    # `begun`: its first line has run. `last_begun`: the first line of the last step of a segment has run.
    begun = False
    last_begun = False
    # See `Gate` of the mailbox.
    gate: Any = None
    # Its caller has cancelled it, and drops its result.
    dropped = False
    # On the loop's clock.
    deadline: float | None = None
    # When it began, on the clock of `Env`.
    since = 0.0
    # The same, while a trace is recorded: when it came, when its arguments were there, when its method ended on the
    # thread; and how it ended.
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
