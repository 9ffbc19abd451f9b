"""Refs in the threads of a process: of the controller, and of an actor's `def` methods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from actors import Echo, Log

import aiodaft
from aiodaft.ref import Refs

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")


def in_thread(job: Callable[[], T]) -> T:
    """Do something in another thread while the loop waits: what is handed to the loop comes after it."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(job())
        except Exception as error:  # noqa: BLE001 - the test gets it
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def be_strict() -> None:
    """Have the loop refuse what is not safe in other threads."""
    asyncio.get_running_loop().set_debug(True)


async def test_a_call_that_a_thread_made_and_cancelled_says_whether_it_ran(module_rt: aiodaft.Runtime) -> None:
    log = await module_rt.spawn(Log)
    be_strict()

    def make_and_cancel() -> aiodaft.Ref[None]:
        ref = log.note_async("from a thread")
        assert ref.cancel()
        return ref

    ref = in_thread(make_and_cancel)
    await ref.ready()
    error = ref.exception()
    seen = await log.all()
    assert (isinstance(error, aiodaft.DaftError) and error.executed is False) == (seen == [])


async def test_a_call_that_was_cancelled_before_its_thread_had_handed_it_over_is_not_made(
    module_rt: aiodaft.Runtime,
) -> None:
    log = await module_rt.spawn(Log)
    ref = in_thread(lambda: log.note_async("from a thread"))
    assert ref.cancel()
    with pytest.raises(aiodaft.CallCancelled, match="before it was sent") as caught:
        await ref
    assert caught.value.executed is False
    assert await log.all() == []


async def test_what_a_thread_asks_of_a_ref_is_done_by_the_loop(module_rt: aiodaft.Runtime) -> None:
    log, echo = await module_rt.spawn(Log), await module_rt.spawn(Echo)
    be_strict()
    waiting, done = log.after_gate("never"), echo.echo("done")
    await done.ready()
    told: asyncio.Queue[Any] = asyncio.Queue()

    def ask() -> aiodaft.Ref[Any]:
        assert not waiting.done()
        assert done.exception() is None
        waiting.add_done_callback(told.put_nowait)
        with pytest.raises(RuntimeError, match="in the thread of its event loop only"):
            waiting.remove_done_callback(told.put_nowait)
        both = Refs([done, echo.echo("new")]).gather()
        assert waiting.cancel()
        done.free()
        return both

    both = in_thread(ask)
    assert await told.get() is waiting
    assert waiting.cancelled()
    with pytest.raises(ReferenceError, match="was freed"):
        await both


@pytest.mark.parametrize("what", ["value", "ready", "released", "into", "completed"])
async def test_a_ref_is_awaited_on_the_loop_of_its_runtime_only(module_rt: aiodaft.Runtime, what: str) -> None:
    log = await module_rt.spawn(Log)
    ref: aiodaft.Ref[Any] = log.after_gate("value")

    async def completed() -> None:
        async for _ in Refs([ref]):
            pass

    ways: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "value": ref.value, "ready": ref.ready, "released": ref.released, "into": lambda: ref.into(None),
        "completed": completed,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="awaited on another event loop"):
        in_thread(lambda: asyncio.run(ways[what]()))
    await log.open_gate()
    assert await ref == "value"


async def test_a_thread_is_told_how_to_put_a_value(module_rt: aiodaft.Runtime) -> None:
    with pytest.raises(
        RuntimeError, match="a value cannot be put where no event loop runs: have .*call_soon_threadsafe"
    ):
        in_thread(lambda: module_rt.put(1))
