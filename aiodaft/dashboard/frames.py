"""The plain data that the page gets once a second: an overview, with rates. Pure."""

from __future__ import annotations

from typing import Final

from aiodaft.causes import message_of
from aiodaft.dashboard.graph import Plain, graph_of
from aiodaft.info import ANSWERING, ActorInfo
from aiodaft.overview import ActorRate, Failure, Overview, ProcessInfo, ProcessRate, Rates

# The most rows that one page shows; the numbers of all are beside them.
MAX_ACTORS: Final = 1000
MAX_PROCESSES: Final = 1000
MAX_FAILURES: Final = 50
_MAX_ERROR: Final = 500

_NO_RATES: Final = Rates(0.0, {}, {}, {})
_STILL: Final = ActorRate(0.0, 0.0)
_IDLE: Final = ProcessRate(0.0, 0.0, 0.0)


def frame_of(now: Overview, earlier: Overview | None) -> Plain:
    """One frame. Without an earlier overview, all rates are 0."""
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
    """The processes; of too many, those that do not answer, and the first ones."""
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
