"""The life of a supervised child, from the spawn of its first incarnation to the end of its last. Pure.

    STARTING --MADE--> UP --FAILED--> DOWN --TURN--> STARTING
        |              |                ^
        |  RESTART     | RESTART        | STOPPED
        +------------> LEAVING ---------+

`NO_MORE` leads from UP to RETIRED and from DOWN to OVER. From STARTING and LEAVING, where a process has to be stopped
first, it leads to ENDING, and from there to OVER.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar


class ChildState(enum.Enum):
    """The state of a child."""

    STARTING = "a process makes it"
    UP = "it takes calls, and is restarted when it dies"
    LEAVING = "it is stopped, and then started again with its siblings"
    ENDING = "it is stopped for good"
    DOWN = "it waits for its turn to be started"
    RETIRED = "it takes calls, and is not restarted"
    OVER = "it is gone for good"


class ChildEvent(enum.Enum):
    """The events in the life of a child."""

    MADE = "its process has made it"
    FAILED = "it died, or could not be made"
    RESTART = "a sibling died, and is restarted together with it"
    DROP = "a sibling died; it is stopped with that one, and not restarted"
    NO_MORE = "its owner stops it, or its policy allows no more restarts"
    STOPPED = "its process has stopped it"
    TURN = "it is started again now"
    ENDED = "nothing is left of it"


_S: Final = ChildState
_E: Final = ChildEvent

TRANSITIONS: Final[dict[tuple[ChildState, ChildEvent], ChildState]] = {
    (_S.STARTING, _E.MADE): _S.UP,
    (_S.STARTING, _E.FAILED): _S.DOWN,
    # It is made in vain: it is stopped when its process has made it.
    (_S.STARTING, _E.RESTART): _S.LEAVING,
    (_S.STARTING, _E.NO_MORE): _S.ENDING,
    (_S.UP, _E.FAILED): _S.DOWN,
    (_S.UP, _E.RESTART): _S.LEAVING,
    (_S.UP, _E.DROP): _S.ENDING,
    # Its owner stops it in its own turn; it takes calls until then.
    (_S.UP, _E.NO_MORE): _S.RETIRED,
    (_S.LEAVING, _E.MADE): _S.LEAVING,
    (_S.LEAVING, _E.RESTART): _S.LEAVING,
    (_S.LEAVING, _E.STOPPED): _S.DOWN,
    # It could not be made, and so there is nothing to stop.
    (_S.LEAVING, _E.FAILED): _S.DOWN,
    (_S.LEAVING, _E.NO_MORE): _S.ENDING,
    (_S.ENDING, _E.MADE): _S.ENDING,
    (_S.ENDING, _E.NO_MORE): _S.ENDING,
    (_S.ENDING, _E.STOPPED): _S.OVER,
    (_S.ENDING, _E.FAILED): _S.OVER,
    (_S.DOWN, _E.TURN): _S.STARTING,
    (_S.DOWN, _E.RESTART): _S.DOWN,
    # It has no process to stop.
    (_S.DOWN, _E.NO_MORE): _S.OVER,
    (_S.RETIRED, _E.NO_MORE): _S.RETIRED,
    **{(state, _E.ENDED): _S.OVER for state in _S},
}

# Its handles lead to its process.
REACHABLE: Final = frozenset({_S.UP, _S.RETIRED})
# Its process has to stop it.
STOPPING: Final = frozenset({_S.LEAVING, _S.ENDING})
# Its supervisor does nothing more with it.
SETTLED: Final = frozenset({_S.RETIRED, _S.OVER})


class Child(Protocol):
    """A child, as far as its next task goes; `due` is the time of its next start."""

    state: ChildState
    due: float


ChildT = TypeVar("ChildT", bound=Child)


def next_task(children: Sequence[ChildT]) -> tuple[ChildT, float | None] | None:
    """The next child to stop, with None, or to start, with the time, of the children that are restarted together."""
    # All stop before the first starts.
    stopping = [child for child in children if child.state in STOPPING]
    if stopping:
        return stopping[-1], None
    down = [child for child in children if child.state is ChildState.DOWN]
    return (down[0], max(child.due for child in down)) if down else None


class Fate(enum.Enum):
    """The meaning of its process's end for a child."""

    NOTHING = "it has no process, or its supervisor stops it"
    NOT_MADE = "its start has failed"
    RESTART = "its supervisor decides"
    OVER = "it is over"


def fate_of(state: ChildState, *, wanted: bool) -> Fate:
    """The fate of a child whose process ended, which may have been `wanted`."""
    if state is ChildState.STARTING:
        return Fate.NOT_MADE
    if state not in REACHABLE:
        return Fate.NOTHING
    return Fate.RESTART if state is ChildState.UP and not wanted else Fate.OVER
