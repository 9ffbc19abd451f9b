"""Seeds of the day: of the schedules that `pytest -m soak` tries, the default suite tries some, others each day."""

from __future__ import annotations

import os
from datetime import date


def of_the_day(count: int, of: int, part: int = 0) -> range:
    """`count` seeds below `of`, other ones for each part; $AIODAFT_TEST_DAY (a number) is the day, by default today."""
    day = int(os.environ.get("AIODAFT_TEST_DAY") or date.today().toordinal())
    first = (day * 7 + part) * count % of
    return range(first, min(first + count, of))
