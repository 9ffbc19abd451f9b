"""The graph of the traffic, on the page of the dashboard."""

from __future__ import annotations

from aiodaft.dashboard.feed import graph_of
from aiodaft.overview import ActorInfo, ActorRate, Flow, FlowRate, Overview, ProcessInfo, Rates

PROGRAM = ProcessInfo("controller-1", 1, "host", "controller", "controller-1", (), answered=True)


def worker(number: int, *actors: str, answered: bool = True) -> ProcessInfo:
    return ProcessInfo(f"worker-{number}", number, "host", "worker", PROGRAM.id, actors, answered=answered)


def overview(processes: list[ProcessInfo], flows: list[Flow], busy: tuple[str, ...] = ()) -> Overview:
    actors = [
        ActorInfo(
            name,
            "Model",
            (),
            1,
            "host",
            (),
            alive=True,
            process=process.id,
            queued=1,
            running=busy if name in busy else (),
        )
        for process in processes
        for name in process.actors
    ]
    return Overview(0.0, 0.0, PROGRAM.id, (), (PROGRAM, *processes), tuple(actors), tuple(flows), (), ())


def flow(source: str, target: str, calls: int = 0, payload: int = 0) -> Flow:
    return Flow(source, target, calls, 10, 100, payload, 0)


def test_processes_are_boxes_with_their_actors() -> None:
    processes = [worker(1, "Model-1"), worker(2, "Model-2", "Model-3", "Model-4"), worker(3, "Model-5", answered=False)]
    flows = [
        flow(PROGRAM.id, "worker-1", calls=5),
        flow("worker-1", "worker-2", payload=1000),
        flow("worker-2", "worker-1"),
    ]
    rates = Rates(1.0, {"Model-1": ActorRate(2.0, 0.0)}, {}, {("worker-1", "worker-2"): FlowRate(0.0, 70.0, 60.0)})
    graph = graph_of(overview(processes, flows, busy=("Model-3",)), rates)
    assert [(box["title"], box["state"], box["calls"], box["queued"]) for box in graph["boxes"]] == [
        ("controller", "idle", 0.0, 0),
        ("Model-1", "idle", 2.0, 1),
        ("Model-2 +2", "busy", 0.0, 3),
        ("Model-5", "silent", 0.0, 1),
    ]
    assert [box["program"] for box in graph["boxes"]] == [True, False, False, False]
    # Bytes that are of no call, and of no large value, the runtime has sent for itself.
    assert [(edge["source"], edge["target"], edge["bytes"], edge["allBytes"]) for edge in graph["edges"]] == [
        (PROGRAM.id, "worker-1", 0.0, 100),
        ("worker-1", "worker-2", 70.0, 1100),
    ]
    assert graph["hidden"] == 0


def test_members_of_groups_are_one_box_if_there_are_many() -> None:
    processes = [worker(number, f"Rank-{number // 10}[{number % 10}]") for number in range(20)]
    flows = [flow(f"worker-{number}", f"worker-{(number + 1) % 20}", calls=1) for number in range(20)]
    rates = Rates(1.0, {}, {}, {(one.source, one.target): FlowRate(1.0, 10.0, 0.0) for one in flows})
    few, many = (graph_of(overview(processes[:count], flows), rates) for count in (10, 20))
    assert [box["title"] for box in few["boxes"]][:2] == ["Rank-0[1]", "Rank-0[2]"]
    assert [(box["title"], box["processes"], box["queued"]) for box in many["boxes"]] == [
        ("Rank-0", 10, 10),
        ("Rank-1", 10, 10),
    ]
    assert [(edge["source"], edge["target"], edge["calls"], edge["bytes"]) for edge in many["edges"]] == [
        ("group Rank-0", "group Rank-1", 1.0, 10.0),
        ("group Rank-1", "group Rank-0", 1.0, 10.0),
    ]


def test_of_too_many_boxes_those_that_have_sent_most_are_shown() -> None:
    processes = [worker(number, f"Model-{number}") for number in range(100)]
    flows = [flow(PROGRAM.id, f"worker-{number}", calls=1, payload=number) for number in range(100)]
    graph = graph_of(overview(processes, flows), Rates(1.0, {}, {}, {}))
    assert [box["title"] for box in graph["boxes"]][:3] == ["controller", "Model-99", "Model-98"]
    assert (len(graph["boxes"]), len(graph["edges"]), graph["hidden"]) == (40, 39, 61)
