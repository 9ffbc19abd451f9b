"""A dataflow as text, line by line, and the words that texts and pictures of graphs share. Pure, in linear time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from aiodaft._protocol.graphs.layout import NO_NOTE, Notes, ValueNote
from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.numbers import amount, count

DataT = TypeVar("DataT")


def listing_of(flow: Dataflow[DataT], notes: Notes) -> str:
    return "\n".join(_lines(flow, notes))


def _lines(flow: Dataflow[DataT], notes: Notes) -> Iterator[str]:
    calls = Counter(step.lane for step in flow.steps)
    yield summary(len(flow.steps), len(calls))
    for (process, name), number in calls.items():
        yield f"  {name} in {process}: {count(number, 'call')}"
    for value in range(flow.inputs):
        yield _line(f"  %{value} = input", "", notes.get(value, NO_NOTE))
    for value, step in enumerate(flow.steps, flow.inputs):
        method = step.label.rpartition(".")[2]
        needs = ", ".join(f"%{need}" for need in step.needs)
        yield _line(f"  %{value} = {step.name}.{method}({needs})", step.line, notes.get(value, NO_NOTE))
    yield f"  return {', '.join(f'%{value}' for value in flow.outputs)}"


def _line(text: str, line: str, note: ValueNote) -> str:
    facts = [value_text(note), "" if note.seconds is None else duration(note.seconds), line.rpartition("/")[2]]
    known = ", ".join(filter(None, facts))
    return f"{text:40}  # {known}" if known else text


def duration(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def value_text(note: ValueNote) -> str:
    """The known facts about a value, such as "float32[8, 64] 2 KiB"."""
    return " ".join(filter(None, [note.kind, "" if note.size is None else amount(note.size)]))


def summary(steps: int, actors: int) -> str:
    return f"{count(steps, 'call')} to {count(actors, 'actor')}"
