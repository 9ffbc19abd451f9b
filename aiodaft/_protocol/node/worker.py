"""The life of a worker process, as its node agent sees it. Pure.

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
from typing import Final


class WorkerState(enum.Enum):
    """The state of a worker process."""

    STARTING = "the fork server makes it"
    UP = "it runs"
    BLAMED = "it runs, as far as is known; calls failed because a connection to it was lost"
    STOPPING = "it was told to end"
    DIED = "it ended by accident, and no failed call is known yet"
    UNHANDLED = "it ended by accident, and no call failed: the scope gets the error"
    OVER = "it ended"


class WorkerEvent(enum.Enum):
    """An event of a worker process, or an action of the node agent."""

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
    """The end of a worker that was not told to end, for errors; None: not known."""
    if oom:
        return "was killed by the kernel (SIGKILL): out of memory"
    if signal is not None:
        return f"was killed by {signal}"
    return "ended, and its exit status is not known" if exit_code is None else f"ended with exit code {exit_code}"
