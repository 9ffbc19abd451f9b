"""Errors in the log: their text may come from another process."""

from __future__ import annotations

import logging

import pytest

from aiodaft._runtime.platform.tasks import log_error, printable


def test_every_line_but_the_first_is_indented() -> None:
    assert printable("one\ntwo\n\nthree\n") == "one\n  | two\n  | \n  | three"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x00c\x85d", "a\\rb\\x00c\\x85d"),
        ("\u2028\u202e\ud800", "\\u2028\\u202e\\ud800"),
        ("gr\u00fc\u00df \u4f60\u597d \U0001f600", "gr\u00fc\u00df \u4f60\u597d \U0001f600"),
    ],
)
def test_control_characters_are_escaped_and_letters_are_not(raw: str, shown: str) -> None:
    assert printable(raw) == shown


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    shown = printable("first" + "x" * 1_000_000 + "last")
    assert shown.startswith("first")
    assert shown.endswith("last")
    assert "characters left out" in shown
    assert len(shown) < 5000


def test_a_text_that_is_all_control_characters_has_a_limited_length_too() -> None:
    assert len(printable("\U000e0001\n" * 1_000_000)) < 100_000


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_is_logged_with_its_type_and_the_error_itself(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ValueError("x\nCRITICAL forged line\x1b[31m" + "y" * 200_000), Unprintable()]
    with caplog.at_level(logging.INFO, logger="aiodaft"):
        for error in errors:
            log_error("Model.step failed", error)
        log_error("not of interest", ValueError(), logging.DEBUG)
    assert [record.message for record in caplog.records] == ["Model.step failed"] * 2
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == errors
    assert {record.funcName for record in caplog.records} == {
        "test_an_error_is_logged_with_its_type_and_the_error_itself"
    }
    assert "\nCRITICAL forged line" not in caplog.text
    assert "  | CRITICAL forged line\\x1b[31m" in caplog.text
    assert "Unprintable" in caplog.text
    assert len(caplog.text) < 10_000
