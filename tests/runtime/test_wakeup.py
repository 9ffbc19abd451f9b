"""Tasks that await refs go on right behind the message that brings the value."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from aiodaft._runtime.platform.tasks import Wakeup, Wakeups

where: ContextVar[str] = ContextVar("where", default="nowhere")


@pytest.fixture
async def wakeups() -> Wakeups:
    loop = asyncio.get_running_loop()
    loop.set_debug(False)
    return Wakeups(loop)


async def wait(wakeup: Wakeup, log: list[str], name: str) -> None:
    where.set(name)
    try:
        await wakeup
    except BaseException as error:
        log.append(f"{name}: {type(error).__name__}")
        raise
    assert where.get() == name
    log.append(name)


def handle_messages(wakeups: Wakeups, *woken: Wakeup) -> None:
    """The handling of messages that bring values, by links."""
    wakeups.collecting = True
    for wakeup in woken:
        wakeup.wake()
    wakeups.collecting = False
    wakeups.run()


async def in_a_callback(what: Callable[[], None]) -> None:
    """Have the loop call something, where no task runs."""
    done = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            what()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the test gets it
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

    asyncio.get_running_loop().call_soon(call)
    await done


def start(wakeups: Wakeups, log: list[str], *names: str) -> list[tuple[Wakeup, asyncio.Task[None]]]:
    loop = asyncio.get_running_loop()
    waiting = []
    for name in names:
        wakeup = Wakeup(wakeups)
        waiting.append((wakeup, loop.create_task(wait(wakeup, log, name))))
    return waiting


async def test_those_who_can_go_on_do_so_in_order_before_the_callback_ends(wakeups: Wakeups) -> None:
    log: list[str] = []
    waiting = start(wakeups, log, "first", "second")
    await asyncio.sleep(0)

    def messages() -> None:
        wakeups.collecting = True
        for wakeup, _ in waiting:
            wakeup.wake()
            wakeup.wake()
        wakeups.collecting = False
        assert log == []
        wakeups.run()
        log.append("over")

    await in_a_callback(messages)
    assert log == ["first", "second", "over"]
    await asyncio.gather(*(task for _, task in waiting))


async def test_who_is_woken_elsewhere_goes_on_in_its_turn(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((wakeup, task),) = start(wakeups, log, "one")
    await asyncio.sleep(0)
    # A task runs here.
    wakeup.wake()
    assert log == []
    await task
    assert log == ["one"]


async def test_a_loop_that_is_debugged_is_told_the_truth_about_who_takes_long() -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        wakeups, log = Wakeups(loop), list[str]()
        ((wakeup, task),) = start(wakeups, log, "one")
        await asyncio.sleep(0)

        def messages() -> None:
            handle_messages(wakeups, wakeup)
            log.append("over")

        await in_a_callback(messages)
        await task
        assert log == ["over", "one"]
    finally:
        loop.set_debug(False)


async def test_who_is_woken_before_it_waits_does_not_wait(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((wakeup, task),) = start(wakeups, log, "early")
    wakeup.wake()
    await task
    assert log == ["early"]


async def test_one_who_goes_on_may_cancel_the_next(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((second, task),) = start(wakeups, log, "second")
    first = Wakeup(wakeups)

    async def cancel() -> None:
        await first
        assert task.cancel()

    canceller = asyncio.get_running_loop().create_task(cancel())
    await asyncio.sleep(0)

    await in_a_callback(lambda: handle_messages(wakeups, first, second))
    await asyncio.wait([task])
    # As with futures: the value had come, but the task was told to end before it went on.
    assert task.cancelled()
    assert log == ["second: CancelledError"]
    await canceller


async def test_a_wait_is_ended_once_and_keeps_nothing_alive(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((wakeup, task),) = start(wakeups, log, "one")
    await asyncio.sleep(0)
    gone = weakref.ref(wakeup)
    gc.disable()
    try:
        task.cancel("enough")
        assert wakeup.cancel() is False
        wakeup.wake()
        await asyncio.wait([task])
        with pytest.raises(asyncio.CancelledError, match="enough"):
            task.result()
        del wakeup, task
        assert gone() is None
    finally:
        gc.enable()
    assert log == ["one: CancelledError"]


async def test_a_wait_may_end_with_an_error(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((wakeup, task),) = start(wakeups, log, "one")
    await asyncio.sleep(0)
    wakeup.set_exception(ValueError("enough"))
    with pytest.raises(ValueError, match="enough"):
        await task
    assert log == ["one: ValueError"]


async def test_who_is_behind_one_that_ends_the_program_goes_on_all_the_same(wakeups: Wakeups) -> None:
    log: list[str] = []
    ((behind, task),) = start(wakeups, log, "behind")
    first = Wakeup(wakeups)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    first.add_done_callback(interrupt)
    await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        await in_a_callback(lambda: handle_messages(wakeups, first, behind))
    await task
    assert log == ["behind"]


async def test_a_callback_can_be_taken_back(wakeups: Wakeups) -> None:
    wakeup, called = Wakeup(wakeups), list[object]()
    wakeup.add_done_callback(called.append)
    assert wakeup.remove_done_callback(print) == 0
    assert wakeup.remove_done_callback(called.append) == 1
    wakeup.wake()
    await asyncio.sleep(0)
    assert called == []
    assert wakeup.get_loop() is asyncio.get_running_loop()
