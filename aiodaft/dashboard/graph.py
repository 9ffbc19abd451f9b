"""The graph of the traffic, as the page draws it: boxes of processes, and edges between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiodaft._protocol.diagnostics.printing import member_of
from aiodaft.info import ActorInfo
from aiodaft.overview import FlowRate, Overview, ProcessInfo, Rates

# JSON objects.
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
