"""Starts coroutines as message handlers do, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from aiodaft._runtime.platform.tasks import Starter


class Call:
    """A started call."""

    task: asyncio.Task[None] | None = None
    context: Context | None = None


class Begun:
    """Starts coroutines as message handlers do: where no task runs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.starter = Starter(self.loop)

    async def __call__(self, *coros: Coroutine[Any, Any, None]) -> list[Call]:
        calls = [Call() for _ in coros]
        done: asyncio.Future[None] = self.loop.create_future()

        def handle() -> None:
            try:
                for call, coro in zip(calls, coros, strict=True):
                    self.starter.start(call, coro)
            except Exception as error:  # noqa: BLE001 - the test that waits gets it
                done.set_exception(error)
            else:
                done.set_result(None)

        self.loop.call_soon(handle)
        await done
        return calls


async def nothing() -> None:
    pass


async def over(call: Call) -> None:
    assert call.task is not None
    await asyncio.wait([call.task])
