"""The events that one process records for a trace. Pure.

Events are plain tuples, because traced programs make one or two of them per call: the functions here build them, and
`trace_file` reads them. Times are seconds on the clock of the process that records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft._protocol.ids import COLLECTIVES, FIRST_USER_ACTOR, KEYED, RESHARDING, ActorId, PeerId

# version-trace_id-parent_id-flags. Versions after 00 may append fields.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_PRINTABLE: Final = re.compile(r"[\t\x20-\x7e]*")
# The least and the greatest length that is passed on.
_MAX_STATE: Final = 512
_MAX_BAGGAGE: Final = 8192
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The trace that a call is part of: `with aiodaft.telemetry.trace_context(headers):` begins it, calls carry it on.

    Attributes:
        traceparent: The trace, the operation in it that the calls belong to, and flags: "00-<32 hex>-<16 hex>-01".
        tracestate: Fields of vendors.
        baggage: Fields of programs: names and values.
    """

    traceparent: str
    tracestate: str = ""
    baggage: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]

    @property
    def span_id(self) -> str:
        return self.traceparent.split("-")[2]

    @property
    def sampled(self) -> bool:
        return bool(int(self.traceparent.split("-")[3], 16) & _SAMPLED)

    def headers(self) -> dict[str, str]:
        """The headers for a request to a server that is to go on with the trace."""
        return {name: value for name, value in self._asdict().items() if value}


def read_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace that a request is part of; None if it is in none, or its header is not valid.

    As the standard says, a `tracestate` or `baggage` that is not valid, or too long, is left out.
    """
    found = {name.lower(): value for name, value in headers.items() if name.lower() in TraceContext._fields}
    traceparent = found.get("traceparent", "").strip()
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5]):
        return None
    state, baggage = found.get("tracestate", "").strip(), found.get("baggage", "").strip()
    if len(state) > _MAX_STATE or not _PRINTABLE.fullmatch(state):
        state = ""
    if len(baggage) > _MAX_BAGGAGE or not _PRINTABLE.fullmatch(baggage):
        baggage = ""
    return TraceContext(traceparent, state, baggage)


Event: TypeAlias = tuple[Any, ...]
# Names something that was submitted, or ran, in all processes: (caller, number) of a call; (owner, graph, run) of a run
# of a graph; (owner, graph, run, value) of a step; with one more field of a strand.
Key: TypeAlias = tuple[Any, ...]

SUBMITTED: Final = 0
RAN: Final = 1
FAILED: Final = 2
FETCHED: Final = 3

# Outcomes of calls. "" is a result; any other one is the name of the error's class.
CANCELLED: Final = "cancelled"
UNFINISHED: Final = "unfinished"
_CANCELLATIONS: Final = {"CancelledError", "CallCancelled", "GeneratorExit"}

# Methods of the runtime's own actors that are the work of the program's collectives.
_SHOWN: Final = {(COLLECTIVES, "step"), (COLLECTIVES, "take"), (KEYED, "outcome")}


def is_shown(actor: ActorId, method: str) -> bool:
    """Whether calls of a method are recorded: not those of the runtime's own actors, except for collectives."""
    return actor >= FIRST_USER_ACTOR or actor == RESHARDING or (actor, method) in _SHOWN


def submitted(
    times: tuple[float, float], key: Key, what: str, actor: str, maker: tuple[Key, int] | None, needs: Sequence[Key]
) -> Event:
    """A call, or a run of a graph, was submitted.

    Args:
        times: Of the submission, and of the moment at which the program went on.
        actor: The name of the actor, or the id of a process whose own actor it is; empty for a graph.
        maker: The call that made it, and the actor of that; None in a program.
    """
    return (SUBMITTED, *times, key, what, actor, maker, tuple(needs))


def ran(
    times: tuple[float, float, float | None, float],
    key: Key,
    actor: int,
    what: str,
    outcome: str,
    inside: Key | None = None,
    needs: Sequence[Key] = (),
) -> Event:
    """A call, a strand or a step is over.

    Args:
        times: Of its arrival, of its last argument's arrival, of its beginning (None: it never began), and of its end.
        outcome: See `outcome_of`.
    """
    return (RAN, *times, key, actor, what, outcome, inside, tuple(needs))


def failed(key: Key, outcome: str) -> Event:
    return (FAILED, key, outcome)


def fetched(began: float, ended: float, kind: str, nbytes: int, source: PeerId) -> Event:
    return (FETCHED, began, ended, kind, nbytes, source)


def outcome_of(error: BaseException) -> str:
    name = type(error).__name__
    return CANCELLED if name in _CANCELLATIONS else name


@dataclass(frozen=True)
class ProcessTrace:
    """The record of one process.

    Attributes:
        dropped: The number of events for which there was no room.
    """

    id: PeerId
    pid: int
    node: str
    actors: dict[int, str]
    events: list[Event]
    dropped: int


@dataclass(frozen=True)
class Ping:
    """The times of a question and of its answer on this clock, and the other clock's time between them."""

    sent: float
    theirs: float
    came: float


def offset_of(pings: Sequence[Ping]) -> float:
    """The seconds by which another clock is ahead of this one: from the quickest answer, as NTP does.

    It is wrong by at most half of the time that this answer took.
    """
    quickest = min(pings, key=lambda ping: ping.came - ping.sent)
    return quickest.theirs - (quickest.sent + quickest.came) / 2
