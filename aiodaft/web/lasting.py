"""The requests under way on one loop: the clients of those that last are watched.

To watch a client takes a task, which is as much work as a short request. A request that ends within one round costs
two entries in a set.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from aiodaft._runtime.platform.tasks import TaskOwner

# Seconds: a client is watched one or two rounds after its request has begun.
_ROUND: Final = 0.02

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LastingRequests] = WeakKeyDictionary()


class Watched(Protocol):
    """A request that has a client."""

    def watch(self, tasks: TaskOwner) -> bool:
        """Begin to watch the client; False if it is watched by others for now."""
        ...


class LastingRequests:
    """Has the clients of requests watched that are still under way after a round."""

    def __init__(self) -> None:
        self._tasks = TaskOwner("aiodaft web")
        self._new: set[Watched] = set()
        self._old: set[Watched] = set()
        self._goes_round = False

    def add(self, request: Watched) -> None:
        self._new.add(request)
        if not self._goes_round:
            self._goes_round = True
            asyncio.get_running_loop().call_later(_ROUND, self._go_round)

    def discard(self, request: Watched) -> None:
        self._new.discard(request)
        self._old.discard(request)

    def _go_round(self) -> None:
        lasting, self._old, self._new = self._old, self._new, set()
        self._new.update(request for request in lasting if not request.watch(self._tasks))
        self._goes_round = bool(self._old or self._new)
        if self._goes_round:
            asyncio.get_running_loop().call_later(_ROUND, self._go_round)


def lasting_requests() -> LastingRequests:
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = LastingRequests()
    return found
