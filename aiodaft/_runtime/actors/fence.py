"""Keeps actors with names from serving when the lease of their node may be over, and others may have the names.

The node tells its workers until when it has the lease; the clock of the machine, which they share, does the rest, also
where the node itself was stopped. Calls of actors without names cost nothing more, those of the others one look at the
clock.
"""

from __future__ import annotations

from collections.abc import Callable

from aiodaft._protocol.ids import ActorId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.process import Process
from aiodaft.exceptions import LeaseLost
from aiodaft.methods import MethodSpec


class Fence:
    """The lease, as one worker knows it.

    Args:
        process: Has the clock.
        catch_up: Reads the messages that the node has sent so far: a process that was busy may have news that it has
            not read.
    """

    def __init__(self, process: Process, catch_up: Callable[[], object]) -> None:
        self._now = process.env.monotonic
        self._catch_up = catch_up
        self._until = 0.0
        self._guarded: set[ActorId] = set()

    def prolong(self, until: float) -> None:
        self._until = max(self._until, until)

    def guard(self, hosted: HostedActor) -> None:
        """Have an actor, which has a name, refuse calls that come without a lease. Idempotent."""
        if hosted.id in self._guarded:
            return
        self._guarded.add(hosted.id)
        find = hosted.find_spec

        def find_in_time(method: str) -> MethodSpec | None:
            if self._now() >= self._until:
                self._catch_up()
                if self._now() >= self._until:
                    hosted.refusal = LeaseLost(
                        f"{hosted.where} has a name and serves only while its node has a lease: the node has not heard "
                        "from the coordinator for so long that another actor may have the name"
                    )
                    return None
            hosted.refusal = None
            return find(method)

        hosted.find_spec = find_in_time
