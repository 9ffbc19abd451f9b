"""The same values count as numbers for every option, and a wrong one is a ValueError that names the option."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest

import aiodaft
from aiodaft import Patience, Restart
from aiodaft._protocol.calls.mailbox import check_concurrency, check_max_queue
from aiodaft._protocol.calls.outgoing import check_retries
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.numbers import is_count, is_number
from aiodaft.logs import Logs
from aiodaft.web.admission import admission_of

INF: Final = float("inf")
NAN: Final = float("nan")


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [
        (1, 1, True), (0, 1, False), (0, 0, True), (-1, 0, False), (10**400, 1, True), (True, 1, False),
        (False, 0, False), (1.0, 1, False), (INF, 1, False), (NAN, 1, False), ("1", 1, False), (None, 0, False),
    ],
)  # fmt: skip
def test_a_count_is_an_integer_that_is_not_below_the_least(value: object, least: int, expected: bool) -> None:
    assert is_count(value, least) is expected


@pytest.mark.parametrize(
    ("value", "least", "most", "expected"),
    [
        (0, 0, 1, True), (0.5, 0, 1, True), (1, 0, 1, True), (1.01, 0, 1, False), (-0.1, 0, 1, False),
        (INF, 0, INF, True), (NAN, 0, INF, False), (True, 0, 1, False), ("1", 0, 1, False), (None, 0, 1, False),
        (1j, 0, 1, False),
    ],
)  # fmt: skip
def test_a_number_is_in_its_range(value: object, least: float, most: float, expected: bool) -> None:
    assert is_number(value, least, most) is expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, True), (1e308, True), (10**400, False), (INF, False), (NAN, False)]
)
def test_a_number_is_finite_where_no_limit_is_named(value: object, expected: bool) -> None:
    assert is_number(value) is expected


def deadline(seconds: Any) -> None:
    async def block() -> None:
        async with aiodaft.deadline(seconds):
            pass

    asyncio.run(block())


# An option, the least value, and its name in the error.
COUNTS: Final[dict[str, tuple[Callable[[Any], object], int, str]]] = {
    "max_pending": (lambda value: aiodaft.Runtime(max_pending=value), 1, "max_pending="),
    "concurrency": (lambda value: check_concurrency(value, "f", on_thread=False), 1, "`concurrency`"),
    "max_queue": (lambda value: check_max_queue(value, "f"), 1, "`max_queue`"),
    "retries": (lambda value: check_retries(value, "f", idempotent=True, is_stream=False), 1, "`retries`"),
    "intensity": (lambda value: Restart(intensity=value, period=1e6), 0, "intensity="),
    "limit": (lambda value: admission_of(value, 0), 1, "limit="),
    "queue": (lambda value: admission_of(1, value), 0, "queue="),
}
# An option, the least value, whether it may be infinite, and its name in the error.
NUMBERS: Final[dict[str, tuple[Callable[[Any], object], float, bool, str]]] = {
    "stop_grace": (lambda value: aiodaft.Runtime(stop_grace=value), 0, False, "stop_grace="),
    "cancel_grace": (lambda value: aiodaft.Runtime(cancel_grace=value), 0, False, "cancel_grace="),
    "merge": (lambda value: Logs(merge=value), 0, False, "merge="),
    "period": (lambda value: Restart(period=value), 0.2, False, "period="),
    "suspect_after": (lambda value: Patience(value), 0.1, False, "suspect_after="),
    "give_up": (lambda value: Patience(give_up=value), 0.1, False, "give_up="),
    "cpus": (lambda value: Demand(cpus=value), 0, False, "cpus="),
    "deadline": (deadline, 1, True, "a deadline is"),
    "longest backoff": (lambda value: aiodaft.Backoff(max=value), 0, True, "max="),
}


@pytest.mark.parametrize("option", COUNTS)
def test_options_that_are_counts(option: str) -> None:
    give, least, name = COUNTS[option]
    give(least)
    give(least + 1)
    for wrong in (least - 1, True, 1.0, "1", NAN, INF, [1]):
        with pytest.raises(ValueError, match=name):
            give(wrong)


@pytest.mark.parametrize("option", NUMBERS)
def test_options_that_are_numbers(option: str) -> None:
    give, least, endless, name = NUMBERS[option]
    give(least)
    give(5)
    if endless:
        give(INF)
    for wrong in (-1, True, "1", NAN, [1], *([] if endless else [INF])):
        with pytest.raises(ValueError, match=name):
            give(wrong)
