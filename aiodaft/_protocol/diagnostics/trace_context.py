"""The trace that a call is part of, in the words of W3C: https://www.w3.org/TR/trace-context/ and /baggage/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

# version-trace_id-parent_id-flags. Versions after 00 may append fields.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_PRINTABLE: Final = re.compile(r"[\t\x20-\x7e]*")
# The least and the greatest length that is passed on.
_MAX_STATE: Final = 512
_MAX_BAGGAGE: Final = 8192
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The trace that a call is part of: `with aiodaft.telemetry.trace_context(headers):` begins it, calls carry it on.

    Attributes:
        traceparent: The trace, the operation in it that the calls belong to, and flags: "00-<32 hex>-<16 hex>-01".
        tracestate: Fields of vendors.
        baggage: Fields of programs: names and values.
    """

    traceparent: str
    tracestate: str = ""
    baggage: str = ""

    @property
    def trace_id(self) -> str:
        """The id of the trace: 32 hexadecimal digits."""
        return self.traceparent.split("-")[1]

    @property
    def span_id(self) -> str:
        """The id of the operation that the calls belong to: 16 hexadecimal digits."""
        return self.traceparent.split("-")[2]

    @property
    def sampled(self) -> bool:
        """Whether the caller may have recorded the trace."""
        return bool(int(self.traceparent.split("-")[3], 16) & _SAMPLED)

    def headers(self) -> dict[str, str]:
        """The headers for a request to a server that is to go on with the trace."""
        return {name: value for name, value in self._asdict().items() if value}


def read_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace that a request is part of; None if it is in none, or its header is not valid.

    As the standard says, a `tracestate` or `baggage` that is not valid, or too long, is left out.
    """
    found = {name.lower(): value for name, value in headers.items() if name.lower() in TraceContext._fields}
    traceparent = found.get("traceparent", "").strip()
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5]):
        return None
    state, baggage = found.get("tracestate", "").strip(), found.get("baggage", "").strip()
    if len(state) > _MAX_STATE or not _PRINTABLE.fullmatch(state):
        state = ""
    if len(baggage) > _MAX_BAGGAGE or not _PRINTABLE.fullmatch(baggage):
        baggage = ""
    return TraceContext(traceparent, state, baggage)
