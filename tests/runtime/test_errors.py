"""Exceptions on the wire: they arrive as their own type, however large or deep they are, or say why not."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from failing import CustomError, HostileError
from odd_errors import BUILTIN, ODD, ReducedError, SlotsError, facts_of

import aiodaft
from aiodaft._runtime.serialization.errors import decode_error, encode_error


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any error
        return error
    raise AssertionError


def fail_at(depth: int) -> None:
    if not depth:
        raise ValueError("deep")
    fail_at(depth - 1)


def fail_of_failing(depth: int) -> None:
    """Each error is raised while the one before is handled."""
    try:
        if depth:
            fail_of_failing(depth - 1)
    finally:
        raise KeyError(depth)


def travelled(error: BaseException) -> BaseException:
    encoded = encode_error(error)
    assert len(encoded) < 512 << 10
    return decode_error(encoded)


class Thing:
    pass


def test_the_frames_of_a_travelled_exception_lead_to_nothing_that_received_it() -> None:
    frames = travelled(caught(lambda: fail_at(3))).__traceback__
    assert frames is not None
    while frames is not None:
        outer = frames.tb_frame.f_back
        assert outer is None or outer.f_back is None
        frames = frames.tb_next


def test_what_the_frames_of_an_exception_had_is_not_kept() -> None:
    seen: list[weakref.ref[Thing]] = []

    def fail() -> None:
        thing = Thing()
        seen.append(weakref.ref(thing))
        raise ValueError("with a thing in its frame")

    gc.disable()
    try:
        encode_error(caught(fail))
        assert seen[0]() is None
    finally:
        gc.enable()


def fail_on_several_lines(empty: dict[str, list[int]]) -> object:
    return sorted(
        [2, 1],
        key=lambda number: empty["key"][
            number
        ],
    )  # fmt: skip


def test_a_traceback_that_has_travelled_shows_the_same_lines_and_marks() -> None:
    error = caught(lambda: fail_on_several_lines({}))
    shown = traceback.format_exception(error)
    found = travelled(error)
    assert traceback.format_exception(found) == shown
    # Notebooks and debuggers look for the function from the first line of its code on.
    frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
    assert [frame.f_code.co_firstlineno for frame in frames] == [
        frame.f_code.co_firstlineno for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    assert all(frame.f_locals.keys() == {"__name__", "__builtins__", "..."} for frame in frames)


@pytest.mark.parametrize("depth", [98, 99, 100, 500, 900])
def test_the_frames_of_a_deep_stack_are_cut_and_its_type_is_kept(depth: int) -> None:
    error = travelled(caught(lambda: fail_at(depth)))
    assert type(error) is ValueError
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    # Besides the levels: `caught` and its lambda.
    missing = max(0, depth + 3 - 100)
    gap = [f"<{missing} frames left out>"] if missing else []
    assert frames == [
        "caught",
        "<lambda>",
        *["fail_at"] * (18 if gap else depth + 1),
        *gap,
        *["fail_at"] * 80 * bool(gap),
    ]


def test_a_recursion_without_end_is_a_recursion_error() -> None:
    def forever() -> None:
        forever()

    error = travelled(caught(forever))
    assert type(error) is RecursionError
    assert "frames left out" in "".join(traceback.format_exception(error))


def test_what_has_many_causes_keeps_its_type() -> None:
    # Some versions of Python can pickle that many, others cannot.
    found = travelled(caught(lambda: fail_of_failing(600)))
    assert (type(found), found.args) == (KeyError, (600,))


@pytest.mark.parametrize("error", [
    ValueError("x" * 50_000_000),
    OSError(5, "x" * 1_000_000),
    CustomError(code=7, detail="x" * 1_000_000),
    ValueError({"key": ["x" * 1_000_000]}, "short"),
    ExceptionGroup("several", [KeyError("y" * 1_000_000), ValueError(1)]),
    aiodaft.ActorDied("x" * 1_000_000, executed=False),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_what_is_too_large_is_cut_and_keeps_its_type(error: Exception) -> None:
    error.add_note("of the user")
    found = travelled(error)
    assert type(found) is type(error)
    assert len(str(found)) < 20_000
    assert found.__notes__[0] == "of the user"
    assert "truncated to travel" in found.__notes__[-1]
    if isinstance(error, CustomError):
        assert vars(found)["code"] == 7
    if isinstance(error, aiodaft.ActorDied):
        assert vars(found)["executed"] is False


def test_what_is_large_inside_a_group_is_cut_there() -> None:
    found = travelled(ExceptionGroup("several", [KeyError("y" * 1_000_000), ValueError(1)]))
    assert isinstance(found, ExceptionGroup)
    assert [type(one) for one in found.exceptions] == [KeyError, ValueError]


class Endless(Exception):
    """Is always as large."""

    def __reduce__(self) -> Any:
        return Endless, ("x" * 1_000_000,)


@pytest.mark.parametrize(("error", "why"), [
    (Endless(), "it is too large, and cannot be truncated: "),
    (HostileError(), "no pickle either"),
])  # fmt: skip
def test_one_that_comes_as_text_says_why(error: Exception, why: str) -> None:
    found = travelled(error)
    assert isinstance(found, aiodaft.RemoteError)
    assert found.type_name.endswith(type(error).__name__)
    assert why in found.__notes__[0]


@pytest.mark.parametrize("error", [*BUILTIN, *ODD, ReducedError(1, 2)], ids=lambda error: type(error).__name__)
def test_an_exception_arrives_with_its_text_its_arguments_and_its_attributes(error: BaseException) -> None:
    assert facts_of(travelled(error)) == facts_of(error)


def test_an_exception_arrives_with_what_leads_back_to_it() -> None:
    error: Any = SlotsError(first=1)
    error.first, error.itself = error, error
    found: Any = travelled(error)
    assert found.first is found.itself is found


def test_the_object_of_an_attribute_error_stays() -> None:
    found = travelled(caught(lambda: object().missing))  # type: ignore[attr-defined]  # the point
    assert isinstance(found, AttributeError)
    assert (found.name, found.obj) == ("missing", None)


def test_a_decoding_error_of_a_large_text_says_what_it_said() -> None:
    error = caught(lambda: (b"x" * 1_000_000 + b"\xff").decode())
    found = travelled(error)
    assert type(found) is UnicodeDecodeError
    assert (found.start, found.reason) == (1_000_000, "invalid start byte")
    assert f"its text was: {error}" in found.__notes__


def test_what_is_large_in_an_attribute_is_cut_there() -> None:
    found = travelled(SlotsError(first="x" * 1_000_000))
    assert isinstance(found, SlotsError)
    assert found.filename == "f.txt"
    assert len(found.first) < 20_000
