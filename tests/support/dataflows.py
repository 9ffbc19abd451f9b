"""Dataflows for the tests of plans and runs."""

from __future__ import annotations

from hypothesis import strategies as st

from aiodaft._protocol.calls.mailbox import Rules
from aiodaft._protocol.graphs.plan import ActorKey, Dataflow, Step
from aiodaft._protocol.ids import ActorId, PeerId

LOOP, THREAD, BOUNDED = Rules("go"), Rules("work", on_thread=True), Rules("few", concurrency=1)


def actor(process: int, number: int = 16) -> ActorKey:
    return PeerId(f"worker-{process}"), ActorId(number)


def step(key: ActorKey, *needs: int, rules: Rules = LOOP, line: str = "x.py:1") -> Step[None]:
    return Step(key, f"A-{key[1]}", f"A.{rules.name}", line, rules, needs, None)


@st.composite
def flows(draw: st.DrawFn) -> Dataflow[None]:
    inputs = draw(st.integers(0, 3))
    steps: list[Step[None]] = []
    for index in range(draw(st.integers(1, 12))):
        known = inputs + index
        needs = draw(st.lists(st.integers(0, known - 1), max_size=3)) if known else []
        key = actor(draw(st.integers(0, 2)), draw(st.integers(16, 17)))
        steps.append(step(key, *needs, rules=draw(st.sampled_from([LOOP, THREAD, BOUNDED]))))
    outputs = draw(st.lists(st.integers(inputs, inputs + len(steps) - 1), min_size=1, max_size=3))
    return Dataflow(inputs, tuple(steps), tuple(outputs))
