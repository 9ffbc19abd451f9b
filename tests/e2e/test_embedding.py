"""The runtime inside programs that it does not own: web servers, anyio, plain loops, notebooks (row CR10)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from actors import Echo, Sleeper
from failing import Failing
from fastapi import FastAPI
from leaks import is_alive
from llm import LLM
from log_ear import listening
from router import make_app
from web_server import serving

import aiodaft
from aiodaft.web import ClientDisconnected

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def in_a_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """As servers and notebooks run things: in a task of its own."""
    return asyncio.get_running_loop().create_task(work)


async def history_with(app: FastAPI, event: str) -> list[str]:
    """The history of the models, once this is part of it."""
    while True:
        history = [one for member in app.state.models for one in await member.history()]
        if event in history:
            return history


# start() and stop().


@pytest.fixture
async def stopped() -> AsyncGenerator[None, None]:
    """No started runtime is left behind."""
    yield
    await aiodaft.stop()


async def test_starting_again_gives_the_runtime_that_is_open(stopped: None) -> None:
    first = await in_a_task(aiodaft.start(gpus=2, preload=()))
    echo = await first.on(gpus=2).spawn(Echo)
    assert await in_a_task(aiodaft.start(gpus=2, preload=())) is first
    assert await in_a_task(aiodaft.start()) is first
    assert await echo.echo("goes on") == "goes on"


def test_starting_under_another_framework_leaves_the_runtime_that_is_open() -> None:
    with asyncio.Runner() as runner:
        rt = runner.run(aiodaft.start(preload=()))
        with pytest.raises(RuntimeError, match="no event loop of asyncio runs here"):
            aiodaft.start().send(None)
        assert runner.run(aiodaft.start()) is rt
        runner.run(aiodaft.stop())


async def test_signals_that_the_program_handles_come_while_a_runtime_is_started_and_after(stopped: None) -> None:
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    await aiodaft.start(preload=())
    await asyncio.sleep(0)
    loop.add_signal_handler(signal.SIGUSR1, came.set)
    try:
        for end in (aiodaft.start, aiodaft.stop):
            os.kill(os.getpid(), signal.SIGUSR1)
            await came.wait()
            came.clear()
            await end()
        os.kill(os.getpid(), signal.SIGUSR1)
        await came.wait()
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


async def test_starting_again_with_other_options_is_refused_and_ends_nothing(stopped: None) -> None:
    first = await aiodaft.start(preload=())
    echo = await first.spawn(Echo)
    with pytest.raises(RuntimeError, match=r"open already, started with preload=\(\), not with gpus=2: .*stop\(\)"):
        await aiodaft.start(gpus=2)
    assert await echo.echo("goes on") == "goes on"


async def test_starting_again_after_the_runtime_was_closed_opens_a_new_one(stopped: None) -> None:
    first = await aiodaft.start(preload=())
    failing = await first.spawn(Failing)
    held = failing.raise_value_error("of the old one")
    await held.ready()
    await first.aclose()
    second = await aiodaft.start(gpus=2, preload=())
    assert second is not first
    assert await (await second.on(gpus=2).spawn(Echo)).echo("new") == "new"


async def test_running_a_program_inside_a_loop_says_what_to_do() -> None:
    async def main() -> None:
        raise AssertionError("never runs")

    with pytest.raises(RuntimeError, match=r"^an event loop runs here already: `await main\(\)` in place of"):
        aiodaft.run(main())


def test_running_a_function_instead_of_its_coroutine_says_what_to_do() -> None:
    async def main() -> None:
        raise AssertionError("never runs")

    with pytest.raises(TypeError, match=r"as in `aiodaft\.run\(main\(\)\)`, not <function"):
        aiodaft.run(main)  # type: ignore[arg-type]


HANDLES_SIGTERM = """
import asyncio, signal, aiodaft

async def main():
    # As uvicorn does. The loop hears of the signals in their order.
    before = signal.signal(signal.SIGTERM, lambda *_: print("handled"))
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    await heard.wait()
    print("not cancelled")
    signal.signal(signal.SIGTERM, before)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.Event().wait()

aiodaft.run(main())
"""


def test_a_server_that_handles_sigterm_itself_is_not_cancelled_by_it() -> None:
    command = [sys.executable, "-c", HANDLES_SIGTERM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr) == ("handled\nnot cancelled\n", "")
    assert done.returncode == 128 + signal.SIGTERM


async def test_options_that_a_runtime_refuses_leave_nothing_started(stopped: None) -> None:
    with pytest.raises(ValueError, match="stop_grace=-1"):
        await aiodaft.start(stop_grace=-1)
    assert await (await (await aiodaft.start(preload=())).spawn(Echo)).echo(1) == 1


async def test_stopping_is_idempotent_and_needs_no_start() -> None:
    await aiodaft.stop()
    rt = await aiodaft.start()
    await aiodaft.stop()
    await aiodaft.stop()
    await rt.aclose()
    again = await aiodaft.start()
    assert again is not rt
    await again.aclose()
    await again.aclose()
    await aiodaft.stop()


@pytest.mark.parametrize("options", [{}, {"unhandled": "raise"}])
async def test_an_error_that_no_code_sees_cancels_no_cell(options: dict[str, Any]) -> None:
    rt = await in_a_task(aiodaft.start(preload=(), **options))
    failing = await rt.spawn(Failing)

    async def hosted() -> None:
        failing.raise_value_error("no code sees this")
        await ear.hears("ValueError: no code sees this")

    with listening() as ear:
        await in_a_task(hosted())
    assert await failing.use("next cell") == "next cell"
    with pytest.raises(ExceptionGroup) if options else nullcontext() as caught:
        await aiodaft.stop()
    if caught is not None:
        assert [str(error) for error in caught.value.exceptions] == ["no code sees this"]
    await aiodaft.stop()


def test_a_loop_that_was_closed_under_a_started_runtime_does_not_prevent_the_next() -> None:
    pids: list[int] = []

    async def hosted() -> None:
        rt = await aiodaft.start(preload=())
        echo = await rt.spawn(Echo)
        pids.append((await rt.info(echo)).pid)
        # Leaves its link a ring.
        async with aiodaft.compile(lambda x: echo.echo(x)) as graph:
            assert await graph(1) == 1

    async def last() -> None:
        await hosted()
        await aiodaft.stop()

    asyncio.run(hosted())
    asyncio.run(last())
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


# A web server owns the loop.


async def test_requests_are_answered_by_a_group_that_lives_in_the_lifespan() -> None:
    app = make_app()
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        answers = await asyncio.gather(*(client.get("/generate", params={"prompt": f"p{i}"}) for i in range(6)))
        assert [answer.json() for answer in answers] == [f"P{i}" for i in range(6)]
        streamed = await client.get("/stream", params={"prompt": "to be or not"})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text == "data: to\n\ndata: be\n\ndata: or\n\ndata: not\n\n"
        pids = [(await app.state.rt.info(member)).pid for member in app.state.models]
        assert all(map(is_alive, pids))
        counts = [len(history) for history in await app.state.models.all(LLM.history)]
        assert min(counts) > 0
    assert not any(map(is_alive, pids))


async def test_a_server_goes_on_after_a_dropped_error_and_a_dead_replica() -> None:
    app = make_app()
    with listening() as ear:
        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
            assert (await client.get("/warm", params={"prompt": "too long"})).json() == "begun"
            await ear.hears("ValueError: 'too long' is too long")
            assert (await client.get("/generate", params={"prompt": "next"})).json() == "NEXT"
            first, second = app.state.models
            os.kill((await app.state.rt.info(first)).pid, signal.SIGKILL)
            await ear.hears("an actor died while no call was under way")
            assert await second.generate("other") == "OTHER"


async def test_the_lifespan_may_be_left_in_another_task_than_it_was_entered_in() -> None:
    app = make_app()
    context = app.router.lifespan_context(app)
    await in_a_task(context.__aenter__())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/generate", params={"prompt": "hello"})
        assert answer.json() == "HELLO"
    pids = [(await app.state.rt.info(member)).pid for member in app.state.models]
    await in_a_task(context.__aexit__(None, None, None))
    assert not any(map(is_alive, pids))


async def test_a_client_that_leaves_cancels_the_remote_call(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        request = in_a_task(client.get("/generate", params={"prompt": "forever"}))
        assert "forever ended" not in await history_with(app, "forever began")
        request.cancel()
        await asyncio.wait([request])
        await history_with(app, "forever ended")
        assert (await client.get("/generate", params={"prompt": "next"})).json() == "NEXT"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_client_that_leaves_a_stream_ends_its_producer() -> None:
    app = make_app()
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        async with client.stream("GET", "/stream", params={"prompt": "forever"}) as response:
            assert (await anext(response.aiter_lines())) == "data: forever"
        await history_with(app, "forever ended")
        assert (await client.get("/stream", params={"prompt": "a b"})).text == "data: a\n\ndata: b\n\n"


class FakeRequest:
    """A request of a client that leaves when told to."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        return await self.messages.get()


@pytest.mark.asyncio(loop_scope="module")
async def test_only_a_disconnect_cancels_the_block(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    request = FakeRequest()

    async def answer() -> None:
        async with aiodaft.web.cancel_on_disconnect(request):
            await sleeper.sleep(60)

    task = in_a_task(answer())
    request.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    while "sleep began" not in await sleeper.history():
        await asyncio.sleep(0)
    assert not task.done()
    request.messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnected):
        await task
    assert await sleeper.history() == ["sleep began", "sleep cleaned up"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_block_that_ends_first_watches_no_longer(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    request = FakeRequest()
    async with aiodaft.web.cancel_on_disconnect(request):
        assert await echo.echo(1) == 1
    request.messages.put_nowait({"type": "http.disconnect"})
    await asyncio.sleep(0)
    assert request.messages.qsize() == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_block_that_is_cancelled_or_fails_by_itself_raises_just_that(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)

    async def answer(work: Callable[[], Awaitable[object]]) -> None:
        async with aiodaft.web.cancel_on_disconnect(FakeRequest()):
            await work()

    with pytest.raises(ValueError, match="bad value"):
        await answer(failing.raise_value_error)
    task = in_a_task(answer(failing.wait))
    await failing.count()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# anyio.


@pytest.mark.asyncio(loop_scope="module")
async def test_an_anyio_task_group_cancels_remote_calls(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(sleeper.sleep(60).value)
            group.start_soon(sleeper.sleep(60).value)
            while (await sleeper.history()).count("sleep began") < 2:
                await anyio.lowlevel.checkpoint()
            raise ZeroDivisionError
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert (await sleeper.history()).count("sleep cleaned up") == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_remote_error_ends_an_anyio_task_group(rt: aiodaft.Runtime) -> None:
    failing, sleeper = await rt.spawn(Failing), await rt.spawn(Sleeper)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(sleeper.sleep(60).value)
            await sleeper.history()
            group.start_soon(failing.raise_value_error("ends the group").value)
    assert [str(error) for error in caught.value.exceptions] == ["ends the group"]
    assert "sleep cleaned up" in await sleeper.history()


async def test_an_anyio_cancel_scope_ends_a_whole_runtime() -> None:
    pids: list[int] = []
    with anyio.CancelScope() as scope:
        async with aiodaft.Runtime(preload=()) as rt:
            sleeper = await rt.spawn(Sleeper)
            pids.append((await rt.info(sleeper)).pid)
            scope.cancel()
            await sleeper.sleep(60)
    assert scope.cancelled_caught
    assert not any(map(is_alive, pids))


@pytest.mark.asyncio(loop_scope="module")
async def test_an_anyio_shield_keeps_a_call(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    with anyio.CancelScope() as scope:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            assert await echo.echo("shielded") == "shielded"


async def test_a_runtime_opens_in_one_anyio_task_and_serves_others() -> None:
    @asynccontextmanager
    async def echoing() -> AsyncGenerator[Echo, None]:
        async with aiodaft.Runtime(preload=()) as rt:
            yield await rt.spawn(Echo)

    results: list[int] = []

    async def call(echo: Echo, value: int) -> None:
        results.append(await echo.echo(value))

    async with echoing() as echo, anyio.create_task_group() as group:
        for index in range(5):
            group.start_soon(call, echo, index)
    assert sorted(results) == [0, 1, 2, 3, 4]


# Loops of every kind.

SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {support!r})
    {block_uvloop}
    import aiodaft
    from actors import Echo, Sleeper

    async def main():
        # Debug mode tells of these, which says more of the machine.
        asyncio.get_running_loop().slow_callback_duration = 60
        async with aiodaft.Runtime(preload=()) as rt:
            echo, sleeper = await rt.spawn(Echo), await rt.spawn(Sleeper)
            assert await asyncio.gather(echo.echo(1), echo.echo_on_thread(2)) == [1, 2]
            ref = sleeper.sleep(60)
            assert await sleeper.history() == ["sleep began"]
            try:
                await asyncio.wait_for(ref, 0.05)
            except TimeoutError:
                print(await sleeper.history())
        print(type(asyncio.get_running_loop()).__module__.split(".")[0])
        return "done"

    print({run})
"""


@pytest.mark.parametrize(
    ("run", "loop", "with_uvloop"),
    [
        ("aiodaft.run(main())", "uvloop", True),
        ("aiodaft.run(main())", "asyncio", False),
        ("asyncio.run(main())", "asyncio", True),
        ("__import__('anyio').run(main)", "asyncio", False),
        ("__import__('anyio').run(main, backend_options=dict(use_uvloop=True))", "uvloop", True),
    ],
)
def test_the_same_program_runs_on_every_loop_and_nothing_is_warned_of(run: str, loop: str, with_uvloop: bool) -> None:
    block_uvloop = "" if with_uvloop else "sys.modules['uvloop'] = None"
    code = textwrap.dedent(SCRIPT).format(support=str(SUPPORT), run=run, block_uvloop=block_uvloop)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["['sleep began', 'sleep cleaned up']", loop, "done"]


def test_a_program_whose_telemetry_cannot_be_set_up_has_opened_nothing() -> None:
    code = f"""
import asyncio, gc, sys
sys.path.insert(0, {str(SUPPORT)!r})
from aiodaft import Runtime
from span_files import fail

async def main():
    # In debug mode, the loop complains of a step that a busy machine has interrupted.
    asyncio.get_running_loop().slow_callback_duration = 60
    try:
        async with Runtime(telemetry=fail):
            raise AssertionError("it is open")
    except OSError as error:
        print(error)

asyncio.run(main())
gc.collect()
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr) == ("no collector answers\n", "")


async def test_two_runtimes_live_side_by_side() -> None:
    async with aiodaft.Runtime(gpus=1, preload=()) as one, aiodaft.Runtime(gpus=1, preload=()) as two:
        first, second = await one.on(gpus=1).spawn(Echo), await two.on(gpus=1).spawn(Echo)
        assert (await first.echo(1), await second.echo(2)) == (1, 2)
        assert len({await first.pid(), await second.pid(), os.getpid()}) == 3
        with pytest.raises(ValueError, match="belongs to another runtime"):
            await one.info(second)
