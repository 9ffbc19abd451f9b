"""Every transport passes every check, on both loops."""

from __future__ import annotations

import pytest
from conformance import CHECKS
from ends import open_pair
from transports import TRANSPORTS


# A warning of later Pythons about any fork beside threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("check", CHECKS)
async def test_transport_conforms(name: str, check: str) -> None:
    async with open_pair(name) as pair:
        assert await CHECKS[check](pair) is None
