"""The events that a trace records, and the file that it becomes."""

from __future__ import annotations

import json
from typing import Any

from aiodaft._protocol.diagnostics.trace import (
    CANCELLED,
    UNFINISHED,
    Event,
    Key,
    Ping,
    ProcessTrace,
    failed,
    fetched,
    is_shown,
    offset_of,
    outcome_of,
    ran,
    submitted,
    trace_file,
)
from aiodaft._protocol.ids import AGENT, COLLECTIVES, FIRST_USER_ACTOR, KEYED, ActorId, PeerId
from aiodaft.exceptions import CallCancelled

PROGRAM, WORKER = PeerId("controller-1"), PeerId("worker-1")
FIRST, SECOND = FIRST_USER_ACTOR, FIRST_USER_ACTOR + 1


def program(*events: Event) -> ProcessTrace:
    return ProcessTrace(PROGRAM, 10, "here", {}, list(events), 0)


def worker(*events: Event, dropped: int = 0) -> ProcessTrace:
    return ProcessTrace(WORKER, 11, "there", {FIRST: "A-1", SECOND: "B-1"}, list(events), dropped)


def call(number: int, began: float, ended: float, outcome: str = "", actor: int = FIRST) -> Event:
    return ran((began, began, began, ended), (PROGRAM, number), actor, "A.run", outcome)


def file_of(*parts: ProcessTrace | tuple[ProcessTrace, float], left_out: dict[str, str] | None = None) -> Any:
    """The file of a trace from second 100 to second 110, as it is read."""
    pairs = [part if isinstance(part, tuple) else (part, 0.0) for part in parts]
    return json.loads(json.dumps(trace_file(pairs, 100.0, 110.0, left_out or {})))


def events(file: Any, kind: str) -> list[Any]:
    return [event for event in file["traceEvents"] if event["ph"] == kind]


def spans(file: Any) -> list[tuple[str, float, float]]:
    """The slices with their beginnings and ends, in seconds."""
    return [(one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in events(file, "X")]


def test_a_call_has_an_arrow_from_where_it_was_submitted() -> None:
    key = (PROGRAM, 1)
    file = file_of(
        program(submitted((101, 101.5), key, "A.run", "A-1", None, ())),
        worker(ran((102, 103, 104, 105), key, FIRST, "A.run", "")),
    )
    assert spans(file) == [("A.run of A-1", 1, 1.5), ("A.run", 4, 5)]
    (start,), (end,) = events(file, "s"), events(file, "f")
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (1, 1e6, 2, 4e6)
    assert start["id"] == end["id"]
    assert [(one["name"], one["ts"]) for one in events(file, "b")] == [
        ("A.run needs arguments", 2e6),
        ("A.run is queued", 3e6),
    ]
    assert [one["ts"] for one in events(file, "e")] == [3e6, 4e6]
    # Viewers show an event with a local identifier in its process.
    assert [one["id2"] for one in events(file, "b")] == [{"local": "0x1"}, {"local": "0x2"}]


def test_a_value_has_an_arrow_from_the_call_that_made_it() -> None:
    file = file_of(
        program(submitted((101, 101), (PROGRAM, 2), "B.run", "B-1", None, [(PROGRAM, 1)])),
        worker(call(1, 102, 103), call(2, 104, 105, actor=SECOND)),
    )
    (start,) = [event for event in events(file, "s") if event["name"] == "value"]
    # Just before the end: that is not a part of the slice any more.
    assert 2e6 <= start["ts"] < 3e6
    assert [event["ts"] for event in events(file, "f") if event["name"] == "value"] == [4e6]


def test_steps_lie_in_their_strand_and_have_arrows_from_the_run_and_from_each_other() -> None:
    run: Key = (PROGRAM, 7, 0)
    strand, other = (*run, "strand", 0), (*run, "strand", 1)
    file = file_of(
        program(submitted((101, 101), run, "run 0 of a graph", "", None, ())),
        worker(
            ran((101, 101, 102, 102.5), (*run, 1), FIRST, "A.run", "", strand, [(*run, 0)]),
            ran((102.6, 103, 103, 104), (*run, 3), FIRST, "A.last", "", strand, ()),
            ran((101, 101, 102, 105), strand, FIRST, "run of a graph", ""),
            ran((103, 103, 103, 104), (*run, 2), SECOND, "B.run", "", other, [(*run, 1)]),
        ),
    )
    tracks = {one["name"]: one["tid"] for one in events(file, "X") if one["pid"] == 2}
    assert tracks["A.run"] == tracks["run of a graph"] == tracks["A.last"]
    ends = [(event["name"], event["ts"]) for event in events(file, "f")]
    assert sorted(ends) == [("call", 2e6), ("call", 3e6), ("value", 3e6)]


def test_calls_that_overlap_get_tracks_of_their_own_and_later_ones_use_them_again() -> None:
    inner = submitted((101.5, 101.6), (WORKER, 5), "B.run", "B-1", ((PROGRAM, 1), FIRST), ())
    late = submitted((103.5, 103.6), (WORKER, 6), "B.run", "B-1", ((PROGRAM, 1), FIRST), ())
    file = file_of(program(), worker(call(1, 101, 103), call(2, 102, 104), call(3, 103, 105), inner, late))
    names = {event["tid"]: event["args"]["name"] for event in events(file, "M") if event["name"] == "thread_name"}
    assert [names[one["tid"]] for one in events(file, "X")] == ["A-1", "A-1 (2)", "A-1", "A-1", "A-1 (3)"]


def test_steps_of_collectives_are_named_as_by_the_program() -> None:
    key = (PROGRAM, 1)
    part = ProcessTrace(WORKER, 11, "there", {COLLECTIVES: "collectives", FIRST: "A-1"}, [], 0)
    part.events.append(ran((102, 102, 102, 103), key, COLLECTIVES, "Collectives.step", "ValueError"))
    file = file_of(program(submitted((101, 101), key, "all_reduce", WORKER, None, ())), part)
    assert [name for name, _, _ in spans(file)] == ["all_reduce of A-1", "all_reduce: ValueError"]


def test_how_a_call_ended_is_in_its_name_and_in_that_of_its_submission() -> None:
    lost = submitted((101, 101), (PROGRAM, 9), "A.run", "A-1", None, ())
    file = file_of(
        program(lost, failed((PROGRAM, 9), "ActorDied")),
        worker(call(1, 102, 103, "ValueError"), call(2, 103, 104, CANCELLED), call(3, 104, 105, UNFINISHED)),
    )
    names = [name for name, _, _ in spans(file)]
    assert names == ["A.run of A-1: ActorDied", "A.run: ValueError", "A.run: cancelled", "A.run"]
    outcomes = [one["args"].get("outcome") for one in events(file, "X")]
    assert outcomes == ["ActorDied", "ValueError", "cancelled", "unfinished"]


def test_a_call_that_never_began_has_only_waited() -> None:
    file = file_of(program(), worker(ran((101, 101, None, 103), (PROGRAM, 1), FIRST, "A.run", CANCELLED)))
    assert spans(file) == []
    assert [one["ts"] for one in (*events(file, "b"), *events(file, "e"))] == [1e6, 3e6]


def test_what_lies_outside_of_the_trace_is_left_out_or_cut() -> None:
    file = file_of(program(), worker(call(1, 98, 99), call(2, 99, 101), call(3, 109, 112), call(4, 111, 112)))
    assert spans(file) == [("A.run", 0, 1), ("A.run", 9, 10)]


def test_what_still_runs_of_an_actor_that_was_stopped_before_has_a_track() -> None:
    gone = SECOND + 1
    late = submitted((102, 102), (WORKER, 1), "A.run", "A-1", ((PROGRAM, 1), gone), ())
    file = file_of(program(), worker(call(1, 101, 103, actor=gone), late))
    tracks = [event["args"]["name"] for event in events(file, "M") if event["name"] == "thread_name"]
    assert tracks == ["stopped actors"]


def test_the_clocks_of_all_processes_become_one() -> None:
    file = file_of(program(), (worker(call(1, 1102, 1103)), 1000.0))
    assert spans(file) == [("A.run", 2, 3)]


def test_transfers_have_bytes_kind_and_source() -> None:
    file = file_of(program(), worker(fetched(101, 102, "tcp", 3 << 20, PROGRAM), fetched(103, 104, "shm", 10, WORKER)))
    assert [name for name, _, _ in spans(file)] == ["tcp 3 MiB", "shm 10 B"]
    assert [one["args"]["from"] for one in events(file, "X")] == ["controller", "A-1 and B-1"]
    assert events(file, "X")[0]["args"] == {"bytes": 3 << 20, "kind": "tcp", "from": "controller"}


def test_processes_are_named_by_their_actors_also_if_they_gave_their_events_twice() -> None:
    file = file_of(program(), worker(call(1, 101, 102), dropped=2), worker(call(2, 103, 104), dropped=3))
    names = [event["args"]["name"] for event in events(file, "M") if event["name"] == "process_name"]
    assert list(dict.fromkeys(names)) == ["controller (pid 10, here)", "A-1 and B-1 (pid 11, there)"]
    assert {one["pid"] for one in events(file, "X")} == {2}
    assert file["otherData"]["dropped events"] == {"A-1 and B-1": 5}


def test_it_says_which_processes_are_missing() -> None:
    file = file_of(program(), left_out={"A-1": "it did not answer"})
    assert file["otherData"]["left out"] == {"A-1": "it did not answer"}


def test_the_offset_of_a_clock_is_that_of_the_quickest_answer() -> None:
    pings = [Ping(100, 5100.4, 100.8), Ping(101, 5101.1, 101.2), Ping(102, 5102.1, 103)]
    assert offset_of(pings) == 5000


def test_the_runtimes_own_calls_are_not_recorded_except_for_collectives() -> None:
    assert is_shown(FIRST_USER_ACTOR, "run")
    assert is_shown(COLLECTIVES, "step")
    assert is_shown(KEYED, "outcome")
    assert not is_shown(KEYED, "take_part")
    assert not is_shown(AGENT, "host")
    assert is_shown(ActorId(FIRST_USER_ACTOR | 1 << 32), "run")


def test_both_kinds_of_cancellation_are_one_outcome() -> None:
    assert outcome_of(CallCancelled("x")) == outcome_of(type("CancelledError", (BaseException,), {})()) == CANCELLED
    assert outcome_of(KeyError("x")) == "KeyError"
