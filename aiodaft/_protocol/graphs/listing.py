"""A dataflow for people: as lines, as rows of a table, and as a Mermaid flowchart. Pure, in linear time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeVar

from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.numbers import amount, count

DataT = TypeVar("DataT")

# Boxes and arrows: renderers of Mermaid refuse more than 500 arrows.
MOST_DRAWN: Final = 400
_ESCAPES: Final = str.maketrans({character: f"#{ord(character)};" for character in '#"<>&`'})


@dataclass(frozen=True, slots=True)
class ValueNote:
    """The known facts about a value of a graph.

    Attributes:
        kind: Its type, or dtype and shape, such as "float32[8, 64]".
        size: The bytes of its encoding.
        seconds: The running time of the step that made it.
    """

    kind: str = ""
    size: int | None = None
    seconds: float | None = None

    def facts(self) -> list[str]:
        size = "" if self.size is None else amount(self.size)
        seconds = "" if self.seconds is None else duration(self.seconds)
        return [" ".join(filter(None, [self.kind, size])), seconds]


NO_NOTE: Final = ValueNote()
Notes = Mapping[int, ValueNote]


def rows_of(flow: Dataflow[DataT], notes: Notes) -> Iterator[list[str]]:
    """For each value: its number, the call that makes it, its type and size, the time, and the line of the code."""
    for value in range(flow.inputs):
        yield [f"%{value}", "input", *notes.get(value, NO_NOTE).facts(), ""]
    for value, step in enumerate(flow.steps, flow.inputs):
        needs = ", ".join(f"%{need}" for need in step.needs)
        call = f"{step.name}.{step.label.rpartition('.')[2]}({needs})"
        yield [f"%{value}", call, *notes.get(value, NO_NOTE).facts(), step.line.rpartition("/")[2]]


def listing_of(flow: Dataflow[DataT], notes: Notes) -> str:
    calls = Counter(step.lane for step in flow.steps)
    lines = [summary(len(flow.steps), len(calls))]
    lines += [f"  {name} in {process}: {count(number, 'call')}" for (process, name), number in calls.items()]
    for value, call, *facts in rows_of(flow, notes):
        text, known = f"  {value} = {call}", ", ".join(filter(None, facts))
        lines.append(f"{text:40}  # {known}" if known else text)
    return "\n".join([*lines, f"  return {', '.join(f'%{value}' for value in flow.outputs)}"])


def mermaid_of(flow: Dataflow[DataT], notes: Notes) -> str:
    shown = sum(drawn <= MOST_DRAWN for drawn in accumulate(1 + len(set(step.needs)) for step in flow.steps))
    boxes: dict[tuple[PeerId, str], list[str]] = {}
    arrows: list[str] = []
    for value, step in enumerate(flow.steps[:shown], flow.inputs):
        boxes.setdefault(step.lane, []).append(f"    v{value}[{_label(step.label, notes, value)}]")
        for need in dict.fromkeys(step.needs):
            stays = need >= flow.inputs and flow.steps[need - flow.inputs].actor[0] == step.actor[0]
            arrows.append(f"  v{need} {'-.->' if stays else '-->'} v{value}")
    lines = ["flowchart TB"]
    lines += [f"  v{value}([{_label(f'input {value}', notes, value)}])" for value in range(flow.inputs)]
    for number, ((process, name), inner) in enumerate(boxes.items()):
        lines += [f'  subgraph a{number}["{f"{name} in {process}".translate(_ESCAPES)}"]', *inner, "  end"]
    for position, value in enumerate(flow.outputs):
        if value < flow.inputs + shown:
            arrows.append(f'  v{value} --> o{position}(["output{f" {position}" if len(flow.outputs) > 1 else ""}"])')
    if shown < len(flow.steps):
        lines.append(f'  more["{count(len(flow.steps) - shown, "call")} not shown"]')
    return "\n".join([*lines, *arrows, ""])


def _label(title: str, notes: Notes, value: int) -> str:
    facts = filter(None, [title, *notes.get(value, NO_NOTE).facts()])
    return f'"{"<br>".join(fact.translate(_ESCAPES) for fact in facts)}"'


def duration(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def summary(steps: int, actors: int) -> str:
    return f"{count(steps, 'call')} to {count(actors, 'actor')}"
