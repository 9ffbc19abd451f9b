"""A node that is being drained: it takes no new actors, lets those that it has go, and then ends. Pure.

SERVING --begin--> DRAINING --no process is left--> OVER
                       | the grace is over           ^
                       +-----------> EVICTING -------+
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class DrainState(enum.Enum):
    """The state of a node with respect to its drain."""

    SERVING = "it takes actors"
    DRAINING = "it takes no new actors, and waits until its processes have ended"
    EVICTING = "its processes are told to end, because the grace is over"
    OVER = "no process is left: the node ends"


class Drain:
    """The drain of one node."""

    def __init__(self) -> None:
        self.state = DrainState.SERVING
        self._deadline = 0.0

    @property
    def begun(self) -> bool:
        return self.state is not DrainState.SERVING

    def begin(self, grace: float, now: float) -> None:
        """Begin. A later order counts only if it leaves less time."""
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
    """The rest of a drain in one process: its actors, or, when these have gone, the process that may store values."""
    return f"{', '.join(actors) or f'the process of {placed}'} (pid {pid}, of {owner})"
