"""The life of a call at the actor that runs it. Pure.

    FETCHING --FETCHED--> QUEUED --START--> STARTED --ANSWER--> OVER
        |                    |                 |
        +------WITHDRAW------+-----------------+---> WITHDRAWN --ANSWER--> OVER
                                               |
                                               +-CANCEL-> CANCELLED --EXPIRE--> LATE
                                                              |                  |
                                                              +------ANSWER------+--> ABANDONED

The loop moves the stage. Whether a started call has begun is known to the task or thread that runs it, which sets
`begun`: a thread may begin a call at the moment in which the loop withdraws it, so both have to claim that right first.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Stage(Enum):
    """How far a call is."""

    FETCHING = "its arguments are being fetched"
    QUEUED = "it waits for its turn in the mailbox"
    STARTED = "its task or thread has it"
    CANCELLED = "it has begun, and was told to stop; its caller waits for its end"
    LATE = "its deadline passed after it had begun; its caller waits for its cleanup"
    WITHDRAWN = "it will never begin; its caller is about to be told"
    ABANDONED = "it runs, and its caller has its answer, or is gone"
    OVER = "it is answered, and has ended or will never begin"

    # In C, unlike that of Enum: each call is looked up.
    __hash__ = object.__hash__


class Event(Enum):
    """What happens to a call."""

    FETCHED = "its arguments are here"
    START = "the mailbox lets it start"
    WITHDRAW = "it was cancelled, or its arguments cannot be had, before it began"
    CANCEL = "it was cancelled after it had begun"
    EXPIRE = "its deadline passed after it had begun"
    ANSWER = "its caller gets a result or an error, or is gone"

    __hash__ = object.__hash__


FETCHING, QUEUED, STARTED, CANCELLED, LATE, WITHDRAWN, ABANDONED, OVER = Stage
FETCHED, START, WITHDRAW, CANCEL, EXPIRE, ANSWER = Event

# An event that is not here comes too late, and changes nothing: there is one answer, and the first cancellation counts.
NEXT: Final = {
    (FETCHING, FETCHED): QUEUED,
    (QUEUED, START): STARTED,
    # Its arguments or its turn may never come.
    (FETCHING, WITHDRAW): WITHDRAWN,
    (QUEUED, WITHDRAW): WITHDRAWN,
    # The task or thread that has it finds it withdrawn.
    (STARTED, WITHDRAW): WITHDRAWN,
    (STARTED, CANCEL): CANCELLED,
    # The deadline gives a method the grace time anew, whether it is cancelled for that or was before.
    (CANCELLED, EXPIRE): LATE,
    # A stopped actor refuses the calls that wait.
    (FETCHING, ANSWER): OVER,
    (QUEUED, ANSWER): OVER,
    (WITHDRAWN, ANSWER): OVER,
    (STARTED, ANSWER): OVER,
    # The grace time is over, or it runs on a thread, which cannot be interrupted. Or it ends now.
    (CANCELLED, ANSWER): ABANDONED,
    (LATE, ANSWER): ABANDONED,
}

# Nothing has ended the call, or is about to.
WANTED: Final = frozenset({FETCHING, QUEUED, STARTED})
# It was not handed to its task or thread.
WAITING: Final = frozenset({FETCHING, QUEUED})
# The mailbox drops it.
GONE: Final = frozenset({WITHDRAWN, OVER})
# It has begun, and its result is not wanted.
GIVEN_UP: Final = frozenset({CANCELLED, LATE, ABANDONED})
ANSWERED: Final = frozenset({ABANDONED, OVER})


class Life:
    """The stage of one call, and how far its turn is."""

    # Most calls bring their arguments along.
    stage = QUEUED
    # When it was started, one before it had not begun: it has to begin in its turn.
    behind = False
    # Its first line has run; of a segment, the first line of its last step has.
    begun = False
    last_begun = False

    def handle(self, event: Event) -> bool:
        """Move on; False if the event comes too late."""
        after = NEXT.get((self.stage, event))
        if after is None:
            return False
        self.stage = after
        return True

    @property
    def given_up(self) -> bool:
        """Whether it has begun, and its result is not wanted."""
        return self.stage in GIVEN_UP

    @property
    def answered(self) -> bool:
        """Whether its caller has its answer, or is gone."""
        return self.stage in ANSWERED
