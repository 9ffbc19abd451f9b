"""Headers of W3C Trace Context."""

from __future__ import annotations

import pytest

from aiodaft._protocol.diagnostics.trace import TraceContext, read_headers

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_headers_are_read_whatever_their_case_and_written_again() -> None:
    headers = {"Host": "a", "TraceParent": f" {PARENT} ", "tracestate": "rojo=00f0", "Baggage": "user=7,tier=gold"}
    found = read_headers(headers)
    assert found == TraceContext(PARENT, "rojo=00f0", "user=7,tier=gold")
    assert (found.trace_id, found.span_id, found.sampled) == (TRACE, SPAN, True)
    assert found.headers() == {"traceparent": PARENT, "tracestate": "rojo=00f0", "baggage": "user=7,tier=gold"}
    assert TraceContext(f"00-{TRACE}-{SPAN}-02").sampled is False
    assert TraceContext(PARENT).headers() == {"traceparent": PARENT}


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0g",
        f"0x-{TRACE}-{SPAN}-01",
    ],
)
def test_headers_that_are_not_valid_are_no_trace(traceparent: str) -> None:
    assert read_headers({"traceparent": traceparent, "tracestate": "a=b"}) is None


def test_later_versions_of_the_standard_are_understood() -> None:
    found = read_headers({"traceparent": f"01-{TRACE}-{SPAN}-01-more"})
    assert found is not None
    assert (found.trace_id, found.sampled) == (TRACE, True)


def test_a_state_that_is_too_long_or_odd_is_left_out() -> None:
    for state, baggage in [("a" * 513, "b" * 8193), ("a\x00", "b\n c"), ("ü", "☃")]:
        found = read_headers({"traceparent": PARENT, "tracestate": state, "baggage": baggage})
        assert found == TraceContext(PARENT)
