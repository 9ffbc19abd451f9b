"""The drain of a node, without a node."""

from __future__ import annotations

import pytest

from aiodaft._protocol.node.worker import Drain, DrainState, describe

S = DrainState


@pytest.mark.parametrize(
    ("processes", "now", "state"),
    [
        (2, 0.0, S.DRAINING),
        (2, 9.9, S.DRAINING),
        (1, 10.0, S.EVICTING),
        (1, 99.0, S.EVICTING),
        (0, 0.0, S.OVER),
        (0, 99.0, S.OVER),
    ],
)
def test_a_drain_ends_with_the_last_process_and_evicts_what_outstays_the_grace(
    processes: int, now: float, state: DrainState
) -> None:
    drain = Drain()
    drain.begin(10.0, 0.0)
    assert drain.step(processes, now) is state


def test_a_node_without_order_serves_on_also_without_processes() -> None:
    drain = Drain()
    assert drain.step(0, 1e9) is S.SERVING
    assert not drain.begun


def test_of_several_orders_the_one_that_leaves_the_least_time_counts() -> None:
    drain = Drain()
    drain.begin(10.0, 0.0)
    drain.begin(100.0, 1.0)
    assert drain.left(4.0) == 6.0
    drain.begin(1.0, 4.0)
    assert (drain.left(4.0), drain.left(6.0)) == (1.0, 0.0)


def test_what_was_evicted_is_waited_for_and_the_end_is_final() -> None:
    drain = Drain()
    drain.begin(0.0, 0.0)
    assert [drain.step(processes, 0.0) for processes in (2, 1, 0)] == [S.EVICTING, S.EVICTING, S.OVER]
    drain.begin(10.0, 0.0)
    assert drain.step(0, 0.0) is S.OVER


@pytest.mark.parametrize(
    ("actors", "text"),
    [
        (["Model-1", "Model-2"], "Model-1, Model-2 (pid 7, of controller-1)"),
        ([], "the process of Model-3 (pid 7, of controller-1)"),
    ],
)
def test_what_is_left_is_named(actors: list[str], text: str) -> None:
    assert describe(actors, "Model-3", 7, "controller-1") == text
