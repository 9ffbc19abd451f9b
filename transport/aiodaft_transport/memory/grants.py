"""Grants of pooled memory, as the process that gets one reads them: segment, first byte, bytes, number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from aiodaft_transport.exceptions import GrantError

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control, Grant


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


SegmentT = TypeVar("SegmentT", bound=_Sized)


def segment_of(grant: Grant, control: Control, segments: Mapping[int, SegmentT]) -> SegmentT:
    """The segment of a peer that granted bytes are in.

    Raises:
        GrantError: None that is known here.
    """
    number, offset, nbytes, _ = cast("tuple[int, int, int, int]", grant)
    segment = segments.get(number)
    if segment is None or not 0 <= offset < offset + nbytes <= segment.size:
        raise GrantError(f"{control.peer} granted bytes {offset}..{offset + nbytes} of unknown segment {number}")
    return segment
