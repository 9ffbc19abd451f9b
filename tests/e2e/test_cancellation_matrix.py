"""Every way to cancel a call has the same effect, in every stage of the call (group B of the fault tests)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import anyio
import pytest
from cancelled import Subject
from inside import peer_of

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

Wait: TypeAlias = Callable[[], Awaitable[object]]
# Cancels when the call is where it should be, by calling its argument.
Drive: TypeAlias = Callable[[Callable[[], object]], Awaitable[None]]


# The cancelling side. Each waits until its own `async with` or `await` is over: facts of that moment hold on return.


async def by_task(wait: Wait, drive: Drive) -> None:
    async def waiting() -> None:
        await wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(waiting())
        driving = tasks.create_task(drive(task.cancel))
        await asyncio.wait([task])
        assert task.cancelled()
        await driving


async def by_timeout(wait: Wait, drive: Drive) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as scope:
                tasks.create_task(drive(lambda: scope.reschedule(loop.time())))
                await wait()
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0


async def by_sibling(wait: Wait, drive: Drive) -> None:
    fail = asyncio.Event()

    async def failing() -> None:
        await fail.wait()
        raise ZeroDivisionError

    async def waiting() -> None:
        await wait()

    async with asyncio.TaskGroup() as outer:
        outer.create_task(drive(fail.set))
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waiting())
                tasks.create_task(failing())
        assert caught.group_contains(ZeroDivisionError, depth=1)
        assert len(caught.value.exceptions) == 1


async def by_anyio_scope(wait: Wait, drive: Drive) -> None:
    async with asyncio.TaskGroup() as tasks:
        with anyio.move_on_after(3600) as scope:
            tasks.create_task(drive(scope.cancel))
            await wait()
        assert scope.cancelled_caught


async def by_anyio_deadline(wait: Wait, drive: Drive) -> None:
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(3600) as scope:
                tasks.create_task(drive(lambda: setattr(scope, "deadline", anyio.current_time())))
                await wait()


async def by_anyio_group(wait: Wait, drive: Drive) -> None:
    async with asyncio.TaskGroup() as tasks, anyio.create_task_group() as group:
        group.start_soon(wait)
        tasks.create_task(drive(group.cancel_scope.cancel))


async def by_eager_task(wait: Wait, drive: Drive) -> None:
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    try:
        await by_task(wait, drive)
    finally:
        loop.set_task_factory(None)


CALLERS = [by_task, by_timeout, by_sibling, by_anyio_scope, by_anyio_deadline, by_anyio_group]
# On all of Python 3.13, uvloop gives factories of tasks an argument that this one takes from 3.13.3 on.
if sys.version_info >= (3, 12) and not (3, 13) <= sys.version_info < (3, 13, 3):
    CALLERS.append(by_eager_task)


# The places of the call. Each gives the waiting call, the steps before and after the cancellation, and the facts that
# must hold then.


class Case:
    """One call, cancelled while it is in some state."""

    def __init__(self, rt: aiodaft.Runtime, subject: Subject) -> None:
        self.rt = rt
        self.subject = subject

    async def prepare(self) -> None:
        """The steps before the call."""

    async def wait(self) -> None:
        raise NotImplementedError

    async def before(self) -> None:
        await self.subject.has_begun()

    async def after(self) -> None:
        """The steps once the cancellation was asked for."""

    async def check(self) -> None:
        """Called when the wait is over: nothing may be left to happen."""
        assert await self.subject.history() == ["began", "cleaned up"]


class OnLoop(Case):
    async def wait(self) -> None:
        await self.subject.run()


class InStream(Case):
    async def wait(self) -> None:
        async with self.subject.stream() as items:
            async for _ in items:
                pass


class OnThread(Case):
    async def prepare(self) -> None:
        await self.subject.remember_loop()

    async def wait(self) -> None:
        await self.subject.block()

    async def check(self) -> None:
        # The wait is over at once; the method runs on, as `rt.info` shows.
        assert await self.subject.history() == ["began"]
        info = await self.rt.info(self.subject)
        assert (info.abandoned, info.running) == (1, ("Subject.block",))
        await self.subject.let_go()
        while (info := await self.rt.info(self.subject)).abandoned:
            pass
        assert info.running == ()
        assert await self.subject.history() == ["began", "ended"]


class Queued(OnThread):
    async def prepare(self) -> None:
        await super().prepare()
        self.ahead = self.subject.block()

    async def check(self) -> None:
        assert await self.subject.history() == ["began"]
        assert (await self.rt.info(self.subject)).queued == 0
        await self.subject.let_go()
        await self.ahead
        del self.ahead
        assert await self.subject.history() == ["began", "ended"]


class WithoutArgument(Case):
    async def prepare(self) -> None:
        self.other = await self.rt.spawn(Subject)
        self.tasks = await self.subject.tasks()
        self.argument = self.other.opened()

    async def wait(self) -> None:
        await self.subject.use(self.argument)

    async def before(self) -> None:
        while not (await self.rt.info(self.subject)).queued:
            pass

    async def check(self) -> None:
        # No call waits for the argument there any more, and the ref of it is still good here.
        while await self.subject.tasks() > self.tasks:
            pass
        await self.other.let_go()
        assert await self.argument == "a value"
        assert await self.subject.history() == []


class Nested(Case):
    async def prepare(self) -> None:
        self.outer, self.middle = await self.rt.spawn(Subject), await self.rt.spawn(Subject)
        self.chain = [self.outer, self.middle, self.subject]
        self.tasks = [await one.tasks() for one in self.chain]

    async def wait(self) -> None:
        await self.outer.call(self.middle, self.subject)

    async def check(self) -> None:
        await super().check()
        assert [await one.history() for one in self.chain[:2]] == [["cleaned up"]] * 2
        assert [await one.tasks() for one in self.chain] == self.tasks


CASES = [OnLoop, InStream, OnThread, Queued, WithoutArgument, Nested]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("caller", CALLERS)
async def test_the_wait_is_over_when_the_call_is(
    module_rt: aiodaft.Runtime, case: type[Case], caller: Callable[[Wait, Drive], Awaitable[None]]
) -> None:
    it = case(module_rt, await module_rt.spawn(Subject))
    await it.prepare()
    checked = False

    async def wait() -> None:
        nonlocal checked
        try:
            await it.wait()
        finally:
            # At the very moment at which the cancelled task goes on.
            with anyio.CancelScope(shield=True):
                await it.check()
                checked = True

    async def drive(cancel: Callable[[], object]) -> None:
        await it.before()
        cancel()
        await it.after()

    await caller(wait, drive)
    assert checked
    # Results that came too late go with the refs of them.
    while (await module_rt.info(it.subject)).stored_bytes:
        pass
    assert not any(connection.session.calls for connection in peer_of(module_rt).connections.values())


@pytest.fixture
async def patient_rt(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime in which cancelled calls end before their grace time does."""
    async with aiodaft.Runtime(preload=(), cancel_grace=3600) as runtime:
        yield runtime


@pytest.mark.asyncio(loop_scope="function")
async def test_what_a_cancelled_call_gives_all_the_same_is_dropped(patient_rt: aiodaft.Runtime) -> None:
    subject = await patient_rt.spawn(Subject)
    ref = subject.stubborn(subject)
    await subject.has_begun()
    assert ref.cancel()
    # Asked after the cancellation, so that this has come by then.
    await subject.let_go()
    with pytest.raises(aiodaft.CallCancelled, match="it returned a result nevertheless, which was dropped") as caught:
        await ref
    assert caught.value.executed is True
    assert ref.cancelled()
    assert not ref.cancel()
    while (await patient_rt.info(subject)).stored_bytes:
        pass


@pytest.mark.asyncio(loop_scope="function")
async def test_a_run_of_a_graph_that_is_cancelled_starts_no_more_steps_on_the_thread(
    patient_rt: aiodaft.Runtime,
) -> None:
    subject = await patient_rt.spawn(Subject)
    await subject.remember_loop()

    def flow() -> tuple[aiodaft.Ref[bytes], aiodaft.Ref[bytes]]:
        return subject.block(), subject.block()

    async with aiodaft.compile(flow) as graph:
        refs = graph()
        await subject.has_begun()
        for ref in refs:
            ref.cancel()
        for ref, executed in zip(refs, (None, False), strict=True):
            with pytest.raises(aiodaft.CallCancelled) as caught:
                await ref
            assert caught.value.executed is executed
        await subject.let_go()
        while (await patient_rt.info(subject)).abandoned:
            pass
        assert await subject.history() == ["began", "ended"]
