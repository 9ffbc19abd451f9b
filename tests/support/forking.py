"""Forked children of processes that have a runtime: user code that forks, and its outcomes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from actors import Echo
from early_signal import fork_a_child_that_is_terminated_at_once

from aiodaft import Actor, method
from aiodaft.exceptions import RuntimeClosed

FORK = multiprocessing.get_context("fork")


def outcome(attempt: Callable[[], object]) -> str:
    """The outcome of a child's attempt: an awaitable is driven as far as its first wait."""
    try:
        result = attempt()
        if isinstance(result, Awaitable):
            result.__await__().send(None)
            return "waits"
    except StopIteration as end:
        return f"gives {end.value!r}"
    except RuntimeClosed as error:
        return "is refused" if error.executed is False else repr(error)
    except BaseException as error:  # noqa: BLE001 - every error belongs to the parent
        return repr(error)
    else:
        return f"gives {result!r}"


def in_a_child(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The outcome of each attempt in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps({name: outcome(attempt) for name, attempt in attempts.items()}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        found: dict[str, str] = json.loads(told.read())
    os.waitpid(child, 0)
    return found


def wait_for_a_signal(ready: Any) -> None:
    """The whole life of an idle child."""
    ready.set()
    signal.pause()


def terminate_a_child() -> int | None:
    """Fork a child and end it; returns its exit code."""
    ready = FORK.Event()
    child = FORK.Process(target=wait_for_a_signal, args=(ready,))
    child.start()
    ready.wait()
    child.terminate()
    child.join()
    try:
        return child.exitcode
    finally:
        child.close()


def blocked_in_a_child() -> list[int]:
    """The signals that a forked child blocks."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, bytes(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        found = [*told.read()]
    os.waitpid(child, 0)
    return found


class Forker(Actor):
    """Forks."""

    @method
    def call_in_a_child(self, echo: Echo) -> dict[str, str]:
        """As a thread of the actor."""
        return in_a_child({"call": lambda: echo.echo(1), "await": lambda: echo.echo(1).ready()})

    @method
    async def nothing(self) -> AsyncIterator[int]:
        """A stream that gives nothing, and does not end."""
        await asyncio.Event().wait()
        yield 0

    @method
    def terminate_a_child_at_once(self) -> int:
        """As a thread of the actor."""
        return fork_a_child_that_is_terminated_at_once()

    @method
    async def blocked(self) -> tuple[list[int], list[int]]:
        """The signals that a child blocks, and the signals that this process blocks."""
        return blocked_in_a_child(), sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    @method
    async def terminate_a_child(self) -> int | None:
        return terminate_a_child()
