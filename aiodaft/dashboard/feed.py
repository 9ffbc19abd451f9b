"""Looks at a runtime for open pages: at most one in a period, none without a page; and the data of a page, pure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft._protocol.diagnostics.printing import cut, member_of
from aiodaft._runtime.logs.console import Recent, Said
from aiodaft._runtime.logs.options import Line
from aiodaft.causes import message_of
from aiodaft.exceptions import RuntimeClosed
from aiodaft.overview import (
    ANSWERING,
    ActorInfo,
    ActorRate,
    Failure,
    FlowRate,
    Overview,
    ProcessInfo,
    ProcessRate,
    Rates,
)
from aiodaft.runtime import Runtime

Plain: TypeAlias = dict[str, Any]

# More boxes than this are joined by group. Of the rest, those that have sent and received most are shown.
_MANY: Final = 14
_MOST: Final = 40
# States that need attention come first.
_URGENCY: Final = ("dead", "restarting", "silent", "busy", "idle")

_SILENT: Final = FlowRate(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Box:
    key: str
    title: str
    is_program: bool
    processes: int = 0
    calls: float = 0.0
    queued: int = 0
    traffic: int = 0
    states: set[str] = field(default_factory=set)

    def plain(self) -> Plain:
        return {
            "key": self.key,
            "title": self.title,
            "program": self.is_program,
            "processes": self.processes,
            "calls": self.calls,
            "queued": self.queued,
            "state": min(self.states, key=_URGENCY.index, default="idle"),
        }


@dataclass(slots=True)
class _Edge:
    calls: float = 0.0
    bytes: float = 0.0
    all_calls: int = 0
    all_bytes: int = 0


def graph_of(now: Overview, rates: Rates) -> Plain:
    """The boxes, the edges between them, and the number of boxes for which there is no room.

    There is an edge for calls and large values alone: the runtime sends messages of its own, too.
    """
    flows = [flow for flow in now.flows if flow.calls or flow.payload_bytes]
    used = {end for flow in flows for end in (flow.source, flow.target)}
    shown = [one for one in now.processes if one.role == "worker" or one.id in used]
    box_of = _boxes(shown, now.actors, rates, joined=len(shown) > _MANY)
    edges: dict[tuple[str, str], _Edge] = {}
    for flow in flows:
        source, target = box_of.get(flow.source), box_of.get(flow.target)
        if source is None or target is None or source is target:
            continue
        edge, rate = edges.setdefault((source.key, target.key), _Edge()), _rate(rates, flow.source, flow.target)
        edge.calls += rate.calls
        edge.bytes += rate.bytes
        edge.all_calls += flow.calls
        edge.all_bytes += flow.bytes
        source.traffic += flow.bytes
        target.traffic += flow.bytes
    boxes = {box.key: box for box in box_of.values()}
    busiest = sorted(boxes.values(), key=lambda box: (not box.is_program, -box.traffic))[:_MOST]
    kept = {box.key for box in busiest}
    return {
        "boxes": [box.plain() for box in busiest],
        "edges": [
            {
                "source": source,
                "target": target,
                "calls": edge.calls,
                "bytes": edge.bytes,
                "allCalls": edge.all_calls,
                "allBytes": edge.all_bytes,
            }
            for (source, target), edge in edges.items()
            if source in kept and target in kept
        ],
        "hidden": len(boxes) - len(busiest),
    }


def _rate(rates: Rates, source: str, target: str) -> FlowRate:
    return rates.flows.get((source, target), _SILENT)


def _boxes(
    processes: Iterable[ProcessInfo], actors: Iterable[ActorInfo], rates: Rates, *, joined: bool
) -> Mapping[str, _Box]:
    boxes: dict[str, _Box] = {}
    found: dict[str, _Box] = {}
    for process in processes:
        member = member_of(process.actors[0]) if joined and len(process.actors) == 1 else None
        key, title = (process.id, _title(process)) if member is None else (f"group {member.group}", member.group)
        box = boxes.setdefault(key, _Box(key, title, process.role == "controller"))
        box.processes += 1
        box.states |= set() if process.answered else {"silent"}
        found[process.id] = box
    for actor in actors:
        if actor.process in found:
            box = found[actor.process]
            box.states.add(actor.state)
            box.queued += actor.queued
            box.calls += rates.actors[actor.name].calls if actor.name in rates.actors else 0.0
    return found


def _title(process: ProcessInfo) -> str:
    if len(process.actors) > 1:
        return f"{process.actors[0]} +{len(process.actors) - 1}"
    return "controller" if process.role == "controller" and not process.actors else process.title


# The most rows that one page shows; the numbers of all are beside them.
MAX_ACTORS: Final = 1000
MAX_PROCESSES: Final = 1000
MAX_FAILURES: Final = 50
_MAX_ERROR: Final = 500

_NO_RATES: Final = Rates(0.0, {}, {}, {})
_STILL: Final = ActorRate(0.0, 0.0)
_IDLE: Final = ProcessRate(0.0, 0.0, 0.0)


def frame_of(now: Overview, earlier: Overview | None) -> Plain:
    """Without an earlier overview, all rates are 0."""
    titles = {process.id: process.title for process in now.processes}
    rates = _NO_RATES if earlier is None else now.rates(earlier)
    # Of too many, those that want attention, and the first ones.
    actors = sorted(now.actors, key=lambda actor: actor.state in ANSWERING)[:MAX_ACTORS]
    return {
        "taken": now.taken,
        "seconds": rates.seconds,
        "runtime": now.runtime,
        "totals": _totals(now, rates),
        "nodes": [
            {"name": node.name, "state": node.state, "total": dict(node.total), "free": dict(node.free)}
            for node in now.nodes
        ],
        "processes": [_process(one, rates.processes.get(one.id, _IDLE)) for one in _processes(now)],
        "actors": [_actor(one, rates.actors.get(one.name, _STILL)) for one in actors],
        "graph": graph_of(now, rates),
        "stored": [
            {
                "label": one.label,
                "process": titles.get(one.process, one.process),
                "owner": titles.get(one.owner, one.owner),
                "bytes": one.nbytes,
                "device": one.on_device,
                "readers": one.readers,
            }
            for one in now.stored
        ],
        "failures": [_failure(one) for one in now.failures[:MAX_FAILURES]],
    }


def _processes(now: Overview) -> list[ProcessInfo]:
    """Of too many, those that do not answer, and the first ones."""
    return sorted(now.processes, key=lambda process: process.answered)[:MAX_PROCESSES]


def _totals(now: Overview, rates: Rates) -> Plain:
    return {
        "actors": len(now.actors),
        "processes": len(now.processes),
        "busy": sum(actor.state == "busy" for actor in now.actors),
        "unwell": sum(actor.state not in ANSWERING for actor in now.actors),
        "queued": sum(actor.queued for actor in now.actors),
        "calls": rates.calls,
        "failed": sum(rate.failed for rate in rates.actors.values()),
        "failures": sum(actor.failed for actor in now.actors),
        "bytes": rates.bytes,
        "payload": sum(rate.payload_bytes for rate in rates.flows.values()),
        "cpu": sum(rate.cpu for rate in rates.processes.values()),
        "rss": sum(process.rss for process in now.processes),
        "stored": sum(process.stored_bytes for process in now.processes),
        "pooled": sum(process.pooled_bytes for process in now.processes),
        "values": sum(process.stored_values for process in now.processes),
        "silent": len(now.silent),
    }


def _process(process: ProcessInfo, rate: ProcessRate) -> Plain:
    return {
        "id": process.id,
        "title": process.title,
        "role": process.role,
        "node": process.node,
        "pid": process.pid,
        "gpus": list(process.gpus),
        "answered": process.answered,
        "silent": process.silent_for,
        "lag": process.loop_lag,
        "late": list(process.late),
        "rss": process.rss,
        "cpu": rate.cpu,
        "threads": process.threads,
        "stored": process.stored_bytes,
        "values": process.stored_values,
        "pooled": process.pooled_bytes,
        "sent": rate.sent,
        "received": rate.received,
    }


def _actor(actor: ActorInfo, rate: ActorRate) -> Plain:
    error = actor.last_error
    return {
        "name": actor.name,
        "class": actor.class_name,
        "names": list(actor.names),
        "process": actor.process,
        "node": actor.node,
        "pid": actor.pid,
        "gpus": list(actor.gpus),
        "state": actor.state,
        "running": list(actor.running[:3]),
        "besides": len(actor.running[3:]) + actor.running_besides,
        "queued": actor.queued,
        "done": actor.done,
        "failed": actor.failed,
        "calls": rate.calls,
        "restarts": actor.restarts,
        "error": None if error is None else f"{type(error).__name__}: {message_of(error, _MAX_ERROR)}",
    }


def _failure(failure: Failure) -> Plain:
    return {
        "what": failure.what,
        "actor": failure.actor,
        "method": failure.method,
        "pid": failure.pid,
        "line": failure.line,
        "causes": [{"type": one.type, "message": one.message, "path": list(one.path)} for one in failure.causes],
        "times": failure.times,
        "first": failure.first,
        "last": failure.last,
        "followed": list(map(_failure, failure.followed)),
    }


_MAX_TEXT: Final = 4 << 10


def line_of(said: Said) -> Plain:
    """A line or a record: its time, actor, urgency ("" if it was printed), and text."""
    source, entry = said
    if isinstance(entry, Line):
        return {
            "at": entry.at,
            "actor": source.shown_name,
            "pid": source.pid,
            "level": "",
            "stream": entry.stream,
            "text": cut(entry.text, _MAX_TEXT),
        }
    text = str(entry["text"])
    if entry.get("exc_text"):
        text = f"{text}\n{entry['exc_text']}"
    return {
        "at": entry["created"],
        "actor": str(entry.get("actor") or source.shown_name),
        "pid": entry["process"],
        "level": str(entry["levelname"]),
        "stream": 2,
        "text": cut(text, _MAX_TEXT),
    }


_PATIENCE: Final = 1.0
_MAX_LINES: Final = 300
# Looks that may be missing between two of which the second tells what has happened since the first.
_MISSING: Final = 5


class Look(NamedTuple):
    number: int
    frame: Plain


class Feed:
    """The looks at one runtime, which all pages share; `period`: seconds between two.

    A page that waits for a look takes it, so one that does not read, or is gone, causes none.
    """

    def __init__(self, rt: Runtime, period: float) -> None:
        if not 0 < period < float("inf"):
            raise ValueError(f"period={period!r}: a positive number of seconds is needed")
        self._rt = rt
        self._period = period
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self._seen: Overview | None = None
        self._last = Look(0, {})
        self._taken = float("-inf")

    def close(self) -> None:
        self._closed.set()

    def lines(self, after: int) -> tuple[int, list[Plain]]:
        """The output and log records of actors since a line with this number, and the number of the last one.

        -1 is before all. At most the last 300; none in the runtime of an actor, whose program has them.
        """
        recent = self._rt._controller.process.find(Recent)
        found = [] if recent is None else recent.after(after, _MAX_LINES)
        return (found[-1][0] if found else after), [line_of(said) for _, said in found]

    async def newer(self, number: int) -> Look:
        """A look that is newer than the one with this number, and not older than a period.

        Raises:
            RuntimeClosed: The runtime, or this, is closed.

        Cancellation: the next page that waits takes the look.
        """
        async with self._turn:
            age = asyncio.get_running_loop().time() - self._taken
            if number >= self._last.number or age > self._period:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period - age):
                        await self._closed.wait()
                if self._closed.is_set():
                    raise RuntimeClosed("the dashboard is closed")
                await self._look()
            return self._last

    async def _look(self) -> None:
        seen, now = self._seen, asyncio.get_running_loop().time()
        self._seen = await self._rt.overview(patience=_PATIENCE)
        earlier = seen if now - self._taken < _MISSING * (self._period + _PATIENCE) else None
        self._last, self._taken = Look(self._last.number + 1, frame_of(self._seen, earlier)), now
