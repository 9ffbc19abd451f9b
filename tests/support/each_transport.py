"""The runtime of a module on each transport: it says `shared_runtime, rt = on_each_transport, of_module`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import pytest
import pytest_asyncio
from sharded import Rank

import aiodaft


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.transports)]
)
async def on_each_transport(request: pytest.FixtureRequest) -> AsyncIterator[aiodaft.Runtime]:
    """On each transport; on one of them also without pickle."""
    codec: Literal["pickle", "msgpack"] = "msgpack" if request.param == "tcp" else "pickle"
    async with aiodaft.Runtime(transport=request.param, codec=codec) as runtime:
        await runtime.stop(await runtime.spawn(Rank))
        yield runtime


@pytest.fixture
def of_module(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt
