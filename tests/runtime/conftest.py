"""The starters of coroutines, for the tests of `starting`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from beginning import Begun


@pytest.fixture
async def begun() -> AsyncIterator[Begun]:
    begun = Begun()
    yield begun
    begun.starter.close()
