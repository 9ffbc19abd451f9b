"""The events of a chaos run: decided by its seed alone, so that it can be run again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ACTORS", "CREW", "FOLLOWED", "Deed", "Fault", "Harm", "Op", "Round", "rounds", "transport_of"]

ACTORS: Final = 8
# The members of a group, by rank.
CREW: Final = (5, 6, 7)
# Actors that are restarted when they are killed; their handles follow them.
FOLLOWED: Final = (0, 1, *CREW)
# The seconds over which operations and faults of one round are spread.
_SPREAD: Final = 0.6
_SIZES: Final = (10, 5_000, 70_000, 1 << 20, 9 << 20)
# The transports of payloads, by the seed of a run.
_TRANSPORTS: Final = ("shm", "shm", "tcp", "ucx")


class Deed(Enum):
    """The kind of an operation."""

    CALL = "call"
    WORK = "work"
    CHAIN = "chain"
    STREAM = "stream"
    FAN_OUT = "fan-out"
    NESTED = "nested"
    CHANNEL = "channel"
    OWN_CHANNEL = "own channel"
    CROWD = "crowd"
    GRAPH = "graph"
    SHARE = "share"
    MAP = "map"
    QUEUE = "queue"
    THREADS = "threads"
    FORK = "fork"
    TIMEOUT = "timeout"
    CANCEL = "cancel"
    DEADLINE = "deadline"


class Harm(Enum):
    """The kind of a fault."""

    KILL = "kill"
    STOP = "stop"
    FREEZE = "freeze"
    # It gets no descriptors for a moment.
    EXHAUST = "exhaust"
    # It gets no threads for a moment.
    NO_THREADS = "no threads"
    # Its connection to the controller breaks, by which it ends.
    CUT = "cut"
    # Around all actors: the disk with their log files is full for a moment; connections of hosts are reset.
    TROUBLE = "trouble"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        id: Its number. Its calls note `id`, `id + 1`, ... when they run.
        deed: Its kind.
        at: When it begins, in seconds since its round began.
        actors: Indices of the actors that it needs.
        size: Bytes, or items, or hundredths of a second.
    """

    id: int
    deed: Deed
    at: float
    actors: tuple[int, int, int]
    size: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, its actor, its time, and (unless its actor ends by it) its length, in seconds."""

    harm: Harm
    at: float
    actor: int
    lasting: float


@dataclass(frozen=True, slots=True)
class Round:
    """Operations and faults at the same time."""

    ops: tuple[Op, ...]
    faults: tuple[Fault, ...]

    def survivors(self) -> tuple[int, ...]:
        """Indices of the actors that must be there at its end, because nothing in the plan stops them."""
        stopped = {fault.actor for fault in self.faults if fault.harm is Harm.STOP}
        return tuple(index for index in FOLLOWED if index not in stopped)

    def unharmed(self) -> tuple[int, ...]:
        """Indices of the actors that have no reason to end."""
        ended = {fault.actor for fault in self.faults if fault.harm in _ENDS}
        return tuple(index for index in range(ACTORS) if index not in ended)


# By these, an actor ends.
_ENDS: Final = frozenset({Harm.KILL, Harm.STOP, Harm.CUT})
# Their size is a number of items, or of hundredths of a second.
_COUNTED: Final = frozenset({
    Deed.STREAM, Deed.CHANNEL, Deed.OWN_CHANNEL, Deed.CROWD, Deed.QUEUE, Deed.TIMEOUT, Deed.CANCEL,
    Deed.DEADLINE,
})  # fmt: skip


def transport_of(seed: int) -> str:
    """The transport of payloads in a run, if it can be had."""
    return random.Random(f"transport {seed}").choice(_TRANSPORTS)


def rounds(seed: int) -> Iterator[Round]:
    """The rounds of a run, without end. Every fourth round has no faults: there nothing may fail."""
    rng = random.Random(seed)
    number = 0
    while True:
        ops: list[Op] = []
        for _ in range(rng.randint(10, 40)):
            number += ACTORS
            ops.append(_op(rng, number))
        faults = [_fault(rng) for _ in range(rng.choice((0, 1, 1, 3)))]
        # The end of one must not be taken for the state before another.
        once = {(fault.harm, fault.actor): fault for fault in faults}
        yield Round(tuple(ops), tuple(once.values()))


def _op(rng: random.Random, number: int) -> Op:
    deed = rng.choice(list(Deed))
    actors = (rng.randrange(ACTORS), rng.randrange(ACTORS), rng.randrange(ACTORS))
    size = rng.randint(1, 40) if deed in _COUNTED else rng.choice(_SIZES)
    return Op(number, deed, rng.uniform(0, _SPREAD), actors, size)


def _fault(rng: random.Random) -> Fault:
    harm = rng.choices(list(Harm), weights=(6, 2, 3, 2, 2, 2, 1))[0]
    # A member that is stopped is no member any more.
    actor = rng.randrange(ACTORS - len(CREW) if harm is Harm.STOP else ACTORS)
    return Fault(harm, rng.uniform(0, _SPREAD), actor, rng.uniform(0.01, 0.4))
