"""The views of overviews in a terminal. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aiodaft._protocol.numbers import amount, count

Plain = Mapping[str, Any]

_STYLES: Final = {"busy": "green", "idle": "dim", "silent": "bold red", "restarting": "yellow", "dead": "red"}
_ROLES: Final = ("controller", "node", "worker")
_FAILURES: Final = 3
# Lines of a screen beside the rows of processes, nodes and failures.
_FIXED: Final = 4


def top_view(title: str, look: Plain, height: int) -> RenderableType:
    nodes = list(_node_lines(look["nodes"]))
    failures = [Text(line, "red", no_wrap=True) for line in _failure_lines(look["failures"][:_FAILURES])]
    room = max(1, height - _FIXED - len(nodes) - len(failures))
    rows = list(_rows(look, room))
    table = _table(
        ["actor", "state", "runs"], ["calls/s", "failed", "queued", "pid", "cpu", "memory", "stored", "out/s", "in/s"]
    )
    for row in rows[:room]:
        table.add_row(*row)
    left = [Text(f"and {len(rows) - room} more", "dim")] if len(rows) > room else []
    return Group(Text(title, "bold", no_wrap=True), Text(_totals(look)), *nodes, table, *left, *failures)


def memory_view(title: str, look: Plain, most: int) -> RenderableType:
    """The view of `aiodaft memory`: the processes, and the largest values that they store."""
    processes = _table(["process"], ["pid", "in RAM", "stores", "values", "pools keep"])
    for one in sorted(look["processes"], key=lambda one: -one["stored_bytes"]):
        numbers = [
            amount(one["rss"]),
            amount(one["stored_bytes"]),
            f"{one['stored_values']:,}",
            amount(one["pooled_bytes"]),
        ]
        processes.add_row(one["title"], str(one["pid"] or "?"), *(numbers if one["answered"] else ["?"] * len(numbers)))
    stored, titles = look["stored"], {one["id"]: one["title"] for one in look["processes"]}
    values = _table(["value", "stored by", "held by"], ["size", "readers"])
    for one in stored[:most]:
        where = titles.get(one["process"], one["process"]) + " (device)" * one["on_device"]
        label = one["label"] or "copy to pass on"
        values.add_row(label, where, titles.get(one["owner"], one["owner"]), amount(one["nbytes"]), str(one["readers"]))
    parts: list[RenderableType] = [Text(title, "bold", no_wrap=True), processes]
    if stored:
        parts += ["", values]
    if len(stored) > most:
        parts.append(Text(f"and {len(stored) - most} more", "dim"))
    return Group(*parts)


def _table(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _totals(look: Plain) -> str:
    actors, rates = look["actors"], look.get("rates", {"calls": 0, "bytes": 0})
    return "  ".join([
        count(len(actors), "actor"),
        count(len(look["processes"]), "process", "processes"),
        f"{rates['calls']:,.0f} calls/s",
        f"{amount(round(rates['bytes']))}/s",
        f"{sum(actor['queued'] for actor in actors):,} queued",
        f"{amount(sum(process['stored_bytes'] for process in look['processes']))} stored",
    ])  # fmt: skip


def natural(name: str) -> list[tuple[int, str]]:
    """Orders names with numbers as people do: Model-2 before Model-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _node_lines(nodes: Sequence[Plain]) -> Iterator[Text]:
    """The nodes of a cluster; a program on one machine needs none."""
    for node in nodes if any(node["address"] for node in nodes) else ():
        state = "" if node["state"] == "ready" else f"  {node['state']}"
        used = [
            f"{total - node['free'].get(name, 0):g}/{total:g} {name}" for name, total in node["total"].items() if total
        ]
        text = f"{node['name']}  {node['address']}  in use: {', '.join(used) or 'nothing'}{state}"
        yield Text(text, _STYLES["silent"] if node["state"] == "silent" else "", no_wrap=True)


def grouped(entries: Iterable[Plain], key: str) -> dict[str, list[Plain]]:
    found: dict[str, list[Plain]] = {}
    for one in entries:
        found.setdefault(one[key], []).append(one)
    return found


def names_of(actor: Plain) -> list[str]:
    return [actor["name"], *actor["names"]]


def _rows(look: Plain, room: int) -> Iterator[list[str | Text]]:
    """A row for each actor, and for each process without one. The first row of a process has its numbers.

    They are in the order of their names, or with the most calls first if there is no room for all.
    """
    by_name = len(look["actors"]) + len(look["processes"]) <= room
    rates = look.get("rates", {"actors": {}, "processes": {}})
    of_process = grouped(look["actors"], "process")

    def calls(actor: Plain) -> float:
        rate: float = rates["actors"].get(actor["name"], {"calls": 0})["calls"]
        return rate

    def order(process: Plain) -> tuple[Any, ...]:
        called = 0.0 if by_name else sum(map(calls, of_process.get(process["id"], ())))
        return _ROLES.index(process["role"]), -called, natural(process["title"])

    def row(actor: Plain, numbers: Sequence[str]) -> list[str | Text]:
        more = actor["running_besides"] + len(actor["running"]) - 1
        runs = actor["running"][0] + (f" +{more}" if more else "") if actor["running"] else ""
        state = Text(actor["state"], _STYLES[actor["state"]])
        counts = [f"{calls(actor):,.0f}", str(actor["failed"] or ""), str(actor["queued"] or "")]
        return [" ".join(names_of(actor)), state, runs, *counts, *numbers]

    for process in sorted(look["processes"], key=order):
        numbers = _numbers(process, rates["processes"].get(process["id"]))
        actors = of_process.pop(process["id"], [])
        if not actors:
            state = "" if process["answered"] else Text("silent", _STYLES["silent"])
            yield [process["title"], state, "", "", "", "", *numbers]
        for number, actor in enumerate(actors):
            yield row(actor, [""] * len(numbers) if number else numbers)
    # Actors that are being restarted have no process.
    for actors in of_process.values():
        yield from (row(actor, [""] * 6) for actor in actors)


def _numbers(process: Plain, rate: Plain | None) -> list[str]:
    memory = [amount(process["rss"]), amount(process["stored_bytes"])] if process["answered"] else ["?", "?"]
    if rate is None:
        return [str(process["pid"] or "?"), "", *memory, "", ""]
    traffic = [amount(round(rate["sent"])), amount(round(rate["received"]))]
    return [str(process["pid"] or "?"), f"{rate['cpu']:.0%}", *memory, *traffic]


def _failure_lines(failures: Iterable[Plain]) -> Iterator[str]:
    for failure in failures:
        cause = failure["causes"][0] if failure["causes"] else {"type": failure["what"], "message": ""}
        times = f"{failure['times']} x " if failure["times"] > 1 else ""
        where = " of ".join(filter(None, [failure["method"], failure["actor"]]))
        error = f"{cause['type']}: {cause['message']}".splitlines()[0]
        yield f"{times}{error}  in {where}  {failure['line']}".rstrip()
