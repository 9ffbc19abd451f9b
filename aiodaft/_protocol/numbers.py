"""The check that a value is a number, where a user gives one as an option. Pure.

True, False and NaN are none. A limit that may be infinite says so.
"""

from __future__ import annotations

import sys
from typing import Final, TypeGuard

_LARGEST: Final = sys.float_info.max


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, least: float = 0, most: float = _LARGEST) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
