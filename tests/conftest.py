"""What every test stands on: both event loops, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop
from leaks import Snapshot

import aiodaft

# libuv opens a pipe for signals with its first loop, and keeps it for the life of the process.
uvloop.new_event_loop().close()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, descriptor or segment."""
    before = Snapshot.take()
    yield
    gc.collect()
    assert Snapshot.take().new_since(before) == {}


@pytest.fixture
async def rt(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """An open runtime with four GPUs that nobody has."""
    async with aiodaft.Runtime(gpus=4) as runtime:
        yield runtime
