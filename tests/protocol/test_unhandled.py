"""The unhandled errors that are kept, and the error of a block with them."""

from __future__ import annotations

from aiodaft._protocol.diagnostics.failures import LIMIT, Unhandled


def test_a_block_without_unhandled_errors_raises_what_its_body_raises() -> None:
    unhandled = Unhandled()
    assert unhandled.group(None) is None
    assert unhandled.group(KeyError("of the body")) is None
    assert len(unhandled) == 0


def test_unhandled_errors_are_raised_together_in_their_order() -> None:
    unhandled, errors = Unhandled(), [ValueError("one"), KeyError("two")]
    assert all(map(unhandled.add, errors))
    group = unhandled.group(None)
    assert group is not None
    assert list(group.exceptions) == errors
    assert group.message == "errors in a scope"


def test_the_error_of_the_body_comes_first_and_only_once() -> None:
    unhandled, body, other = Unhandled(), ValueError("of the body"), KeyError("other")
    unhandled.add(body)
    assert unhandled.group(body) is None
    unhandled.add(other)
    group = unhandled.group(body)
    assert group is not None
    assert list(group.exceptions) == [body, other]


def test_the_same_error_counts_once_and_equal_ones_count_each() -> None:
    unhandled, error = Unhandled(), ValueError("same")
    assert unhandled.add(error)
    assert not unhandled.add(error)
    assert unhandled.add(ValueError("same"))
    assert len(unhandled) == 2


def test_errors_beyond_the_limit_are_counted_and_not_kept() -> None:
    unhandled, errors = Unhandled(), [ValueError(index) for index in range(LIMIT + 20)]
    kept = [error for error in errors if unhandled.add(error)]
    assert kept == errors[:LIMIT]
    group = unhandled.group(None)
    assert group is not None
    assert list(group.exceptions) == errors[:LIMIT]
    assert group.message == "errors in a scope (20 more were only counted)"
    assert len(unhandled) == LIMIT + 20


def test_a_group_has_the_type_of_what_is_in_it() -> None:
    unhandled = Unhandled()
    unhandled.add(ValueError())
    assert isinstance(unhandled.group(None), ExceptionGroup)
    assert not isinstance(unhandled.group(GeneratorExit()), ExceptionGroup)
