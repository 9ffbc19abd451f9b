"""The fields of a grant are believed only as far as they fit the peer's announcements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from aiodaft_transport import GrantError
from aiodaft_transport.abc import segment_of


@dataclass(frozen=True)
class Segment:
    size: int


@dataclass(frozen=True)
class Connection:
    peer: str


SEGMENTS = {7: Segment(4096)}
LINK: Any = Connection("producer")


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (0, 4096), (4095, 1), (64, 128)])
def test_bytes_inside_a_segment_are_found(offset: int, nbytes: int) -> None:
    assert segment_of((7, offset, nbytes, 1), LINK, SEGMENTS) is SEGMENTS[7]


@pytest.mark.parametrize(
    ("number", "offset", "nbytes"), [(8, 0, 1), (7, 0, 0), (7, 0, 4097), (7, 4096, 1), (7, -1, 2), (7, 8, -8)]
)
def test_other_bytes_are_refused_and_the_error_names_them(number: int, offset: int, nbytes: int) -> None:
    with pytest.raises(GrantError, match=f"producer granted bytes {offset}..{offset + nbytes} of .* {number}$"):
        segment_of((number, offset, nbytes, 1), LINK, SEGMENTS)
