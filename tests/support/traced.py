"""Actors for traces, and the contents of a trace file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiodaft
from aiodaft import Actor, method
from aiodaft._runtime.process import current_process


class Stage(Actor):
    """A stage of a chain."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    @method
    async def twice(self, value: bytes) -> bytes:
        return value * 2

    @method
    def longer(self, value: bytes) -> bytes:
        return value + b"!"

    @method
    async def fail(self, value: bytes) -> bytes:
        raise ValueError("an error of the program")

    @method
    async def wait(self) -> None:
        """Never end."""
        self.begun.set()
        await asyncio.Event().wait()

    @method
    async def has_begun(self) -> None:
        """Wait until `wait` has begun."""
        await self.begun.wait()

    @method
    async def records(self) -> bool:
        return current_process().recorder is not None

    @method
    async def trace_own(self, path: str) -> None:
        """Record a trace, and never end."""
        async with aiodaft.current_runtime().trace(path):
            await self.wait()

    @method
    async def ask(self, other: Stage, value: bytes) -> bytes:
        return await other.longer(value)

    @method
    async def ask_own(self, value: bytes) -> bytes:
        """Ask an actor of its own."""
        async with aiodaft.current_runtime().spawn(Stage) as other:
            return await other.longer(value)

    @method
    async def total(self, value: int) -> int:
        return int(await aiodaft.current_group().all_reduce(value, key="total"))


class TraceFile:
    """The content of a trace file."""

    def __init__(self, path: Path) -> None:
        self.content: dict[str, Any] = json.loads(path.read_text())
        self.mode = path.stat().st_mode & 0o777
        events = self.content["traceEvents"]
        self.slices = [event for event in events if event["ph"] == "X"]
        named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        self.processes = {pid: name.partition(" (pid")[0] for pid, name in named.items()}
        threads = [event for event in events if event["name"] == "thread_name"]
        self.threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in threads}
        self._events = events

    def of(self, category: str) -> list[str]:
        """The slices of a category, with their processes, in order."""
        found = [event for event in self.slices if event["cat"] == category]
        return [self.where(event) for event in sorted(found, key=lambda event: event["ts"])]

    def where(self, event: dict[str, Any]) -> str:
        return f"{self.processes[event['pid']]}: {event['name']}"

    def waits(self) -> list[str]:
        """The waits, and their places."""
        begins = {event["id2"]["local"]: event for event in self._events if event["ph"] == "b"}
        ends = {event["id2"]["local"]: event for event in self._events if event["ph"] == "e"}
        assert begins.keys() == ends.keys()
        assert all(begins[number]["ts"] < ends[number]["ts"] for number in begins)
        return [self.where(event) for event in begins.values()]

    def blocked(self, method: str) -> float:
        """Seconds from the end of the call before to the moment when a call of the method could begin, of all calls."""
        queued = [one for one in self._events if one["ph"] == "b" and one["name"] == f"{method} is queued"]
        blocked = 0.0
        for one in (one for one in self.slices if one["name"] == method):
            track = [other for other in self.slices if (other["pid"], other["tid"]) == (one["pid"], one["tid"])]
            ended = max((other["ts"] + other["dur"] for other in track if other["ts"] < one["ts"]), default=one["ts"])
            came = [wait["ts"] for wait in queued if wait["pid"] == one["pid"] and wait["ts"] <= one["ts"]]
            begins = max(came, default=one["ts"])
            blocked += max(0.0, begins - ended) / 1e6
        return blocked

    def arrows(self, name: str) -> list[tuple[str, str]]:
        """The slices that arrows with a name connect."""
        starts = {event["id"]: event for event in self._events if event["ph"] == "s" and event["name"] == name}
        ends = {event["id"]: event for event in self._events if event["ph"] == "f" and event["name"] == name}
        assert starts.keys() == ends.keys()
        return [(self.around(starts[number]), self.around(ends[number])) for number in sorted(starts)]

    def around(self, point: dict[str, Any]) -> str:
        """The innermost slice that an end of an arrow is bound to."""
        track = [one for one in self.slices if (one["pid"], one["tid"]) == (point["pid"], point["tid"])]
        around = [one for one in track if one["ts"] <= point["ts"] <= one["ts"] + one["dur"]]
        return self.where(min(around, key=lambda one: one["dur"]))

    def check_tracks(self) -> None:
        """Slices on one track lie beside or inside of each other."""
        for track in self.threads:
            ends: list[float] = []
            for one in sorted(
                (one for one in self.slices if (one["pid"], one["tid"]) == track),
                key=lambda one: (one["ts"], -one["dur"]),
            ):
                while ends and ends[-1] <= one["ts"] + 0.0005:
                    ends.pop()
                end = one["ts"] + one["dur"]
                assert not ends or end <= ends[-1] + 0.0015, (self.where(one), self.threads[track])
                ends.append(end)
