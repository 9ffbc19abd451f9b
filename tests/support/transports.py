"""The transports that tests run on."""

from __future__ import annotations

import pytest

from aiodaft_transport import Unreachable, check_name


def why_no_ucx() -> str:
    """Why UCX cannot be tested here; empty if it can."""
    try:
        check_name("ucx")
    except Unreachable as error:
        return str(error)
    return ""


needs_ucx = pytest.mark.skipif(bool(why_no_ucx()), reason=why_no_ucx() or "there is a libucp")
TRANSPORTS = ["shm", pytest.param("ucx", marks=needs_ucx), "tcp"]
# For layers above a transport: the conformance suite shows that all transports do the same.
REPEATED = [
    "shm",
    pytest.param("ucx", marks=[needs_ucx, pytest.mark.transports]),
    pytest.param("tcp", marks=pytest.mark.transports),
]
on_each_transport = pytest.mark.parametrize("shared_runtime", TRANSPORTS, indirect=True)
