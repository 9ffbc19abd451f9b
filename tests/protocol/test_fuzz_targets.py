"""Bytes that the fuzzer found to reach different code, and others, break no rule; see `tests/fuzz`."""

from __future__ import annotations

import pytest
from fuzz_targets import TARGETS, kept
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("target", TARGETS)
def test_f85_and_f97_what_the_fuzzer_has_found_breaks_no_rule(target: str) -> None:
    found = kept(target)
    assert found
    for data in found:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.binary(max_size=400))
def test_any_bytes_break_no_rule(target: str, data: bytes) -> None:
    TARGETS[target](data)
