"""A process's records of failures, and the failures that led to others."""

from __future__ import annotations

import re

import pytest

from aiodaft._protocol.diagnostics.failures import (
    Cause,
    Failure,
    FailureLog,
    Subject,
    by_cause,
    causes_of,
    line_of,
    raised_by,
)

STEP = Subject("call", "Model-1", "Model.step", "worker-1", 7)


def failed(actor: str, *causes: Cause, at: float = 0.0) -> Failure:
    return Failure("call", actor, f"{actor}.run", "worker-1", 7, "", causes, 1, at, at)


def raised(message: str, *notes: str) -> ValueError:
    error = ValueError(message)
    for note in notes:
        error.add_note(note)
    return error


def shape(failure: Failure) -> object:
    """The actors of a failure and of those that followed."""
    return (failure.actor, [shape(one) for one in failure.followed]) if failure.followed else failure.actor


def test_equal_failures_are_one_that_is_counted() -> None:
    log = FailureLog()
    for now in (1.0, 2.0, 5.0):
        log.note(STEP, raised("bad"), now)
    log.note(STEP._replace(method="Model.other"), raised("bad"), 6.0)
    assert [(one.method, one.times, one.first, one.last) for one in log] == [
        ("Model.step", 3, 1.0, 5.0),
        ("Model.other", 1, 6.0, 6.0),
    ]


def test_the_failures_that_were_not_seen_for_longest_are_forgotten() -> None:
    log = FailureLog()
    log.note(STEP, raised("again and again"), 0.0)
    for number in range(100):
        log.note(STEP, raised(f"bad {number}"), number)
        log.note(STEP, raised("again and again"), number)
    kept = list(log)
    assert len(kept) == 64
    assert (kept[-1].causes[0].message, kept[-1].times) == ("again and again", 101)
    assert kept[0].causes[0].message == "bad 37"


def test_a_log_keeps_no_exception() -> None:
    class Big(ValueError):
        pass

    log, gone = FailureLog(), []

    class Payload:
        def __del__(self) -> None:
            gone.append(True)

    try:
        payload = Payload()
        raise Big(payload and "bad")
    except Big as error:
        log.note(STEP, error, 0.0)
    del payload
    assert gone == [True]
    assert [one.error for one in log] == ["Big: bad"]


def test_the_causes_of_an_error_begin_with_the_root() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise raised("bad", raised_by("Inner.get in Inner-1"), "another note", raised_by("Outer.get in Outer-1"))
        except ValueError as error:
            raise RuntimeError from error
    root, last = causes_of(caught.value)
    assert root == Cause("ValueError", "bad", ("Inner.get in Inner-1", "Outer.get in Outer-1"))
    assert (str(root), str(last)) == ("ValueError: bad", "RuntimeError")
    line = line_of(caught.value)
    assert re.fullmatch(r"test_failures.py:\d+ in test_the_causes_of_an_error_begin_with_the_root", line)


def test_errors_that_are_hidden_long_or_refuse_their_text_have_causes() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    error = KeyError("seen")
    error.__context__ = ValueError("hidden")
    error.__suppress_context__ = True
    assert [cause.type for cause in causes_of(error)] == ["KeyError"]
    assert causes_of(Mute())[0].message == "<its text cannot be had: OSError>"
    assert len(causes_of(ValueError("x" * 5000))[0].message) == 1024
    assert line_of(error) == ""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert [cause.message for cause in causes_of(one)] == ["other", "one"]


def test_what_came_of_a_failure_is_told_with_it() -> None:
    inner = Cause("ValueError", "bad", ("Inner.get in Inner-1",))
    passed = Cause("ValueError", "bad", ("Inner.get in Inner-1", "Router.get in Router-1"))
    wrapped = Cause("RuntimeError", "no route", ("Gate.get in Gate-1",))
    beside = Cause("ValueError", "bad", ("Inner.get in Inner-2",))
    failures = [
        failed("Gate", passed, wrapped, at=3.0),
        failed("Router", passed, at=2.0),
        failed("Beside", beside, at=4.0),
        failed("Inner", inner, at=1.0),
    ]
    assert list(map(shape, by_cause(failures))) == ["Beside", ("Inner", [("Router", ["Gate"])])]


def test_calls_that_a_death_failed_follow_it() -> None:
    died = Cause("ActorDied", "Model-1 (pid 7) was killed by SIGKILL")
    death = Failure("death", "Model-1", "", "worker-1", 7, "", (died,), 1, 1.0, 1.0)
    calls = [failed(name, Cause(died.type, died.message, (name,)), at=2.0) for name in ("First", "Second")]
    other = failed("Third", Cause(died.type, "Model-2 (pid 8) was killed by SIGKILL", ("Third",)), at=3.0)
    assert list(map(shape, by_cause([*calls, other, death]))) == ["Third", ("Model-1", ["First", "Second"])]


def test_failures_that_look_alike_do_not_follow_each_other() -> None:
    same = Cause("ValueError", "bad", ("Inner.get in Inner-1",))
    assert list(map(shape, by_cause([failed("A", same), failed("B", same)]))) == ["A", "B"]
    assert by_cause([]) == ()
