"""Runs at the owner of a graph and values between steps, without processes."""

from __future__ import annotations

import pytest

from aiodaft._protocol.messages import FAILED_VALUE
from aiodaft._protocol.run import RunEvent, RunState
from aiodaft._runtime.graphs.deployment import Specs
from aiodaft._runtime.graphs.graph_value import GraphValue, value_of
from aiodaft._runtime.graphs.owner_run import OwnerRun
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoded import Encoded


class Graph:
    """Notes what a run asks of its graph."""

    def __init__(self) -> None:
        self.inputs = 0
        self.specs: Specs = []
        self.has_room = True
        self.asked: list[str] = []

    def may_begin(self) -> bool:
        return self.has_room

    def turn_came(self, run: OwnerRun) -> None:
        self.asked.append("send")

    def withdraw(self, run: OwnerRun) -> None:
        self.asked.append("withdraw")
        run.on(RunEvent.ENDED)
        run.release()

    def skip(self, run: OwnerRun) -> None:
        self.asked.append("skip")


def run_with_input(graph: Graph, released: list[bool]) -> OwnerRun:
    stored = StoredValue(Encoded(b""))
    stored.on_release = lambda: released.append(True)
    run = OwnerRun(graph, ())
    run.inputs = [GraphValue.of_stored(stored)]
    return run


@pytest.mark.parametrize("copying", [False, True])
def test_a_run_that_is_cancelled_before_it_is_sent_frees_its_inputs_after_their_copy(copying: bool) -> None:
    graph, released = Graph(), list[bool]()
    run = run_with_input(graph, released)
    if copying:
        run.on(RunEvent.COPY)
        assert not run.may_go()
    assert not run.cancel("a test")
    assert (graph.asked, released) == (["withdraw"], [] if copying else [True])
    if copying:
        run.on(RunEvent.COPIED)
        run.release()
    assert (run.state, released) == (RunState.OVER, [True])


def test_a_run_under_way_is_skipped_once() -> None:
    graph = Graph()
    run = OwnerRun(graph, ())
    run.on(RunEvent.SENT)
    assert run.cancel("a test")
    assert run.cancel("again")
    assert (graph.asked, run.state) == (["skip"], RunState.CANCELLED)


def test_a_run_goes_when_its_inputs_are_copied_and_its_graph_has_room() -> None:
    graph = Graph()
    run = OwnerRun(graph, ())
    run.on(RunEvent.COPY)
    assert not run.may_go()
    run.on(RunEvent.COPIED)
    graph.has_room = False
    assert not run.may_go()
    graph.has_room = True
    assert run.may_go()


def test_each_step_that_needs_a_failed_value_gets_an_exception_of_its_own() -> None:
    failed = GraphValue.of_error(ValueError("no"), executed=True)
    item = (7, failed.failure, failed.executed)
    assert len(item) == FAILED_VALUE
    value = value_of(item)
    assert value is not None
    first, second = (value.error_for(label, "Node.make of Node-1") for label in ("a step", "another step"))
    assert first is not second
    assert first.__notes__[-1].startswith("needed by a step, which did not run")
    assert second.__notes__[-1].startswith("needed by another step")
