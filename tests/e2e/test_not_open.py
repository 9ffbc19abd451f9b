"""The errors of a program while no runtime of it is open: before, after, and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from actors import Echo, Streamer
from inside import awaited

import aiodaft


async def test_a_runtime_that_is_not_open_yet_says_so() -> None:
    rt = aiodaft.Runtime(preload=(), gpus=1)
    assert "not open" in repr(rt)
    with pytest.raises(
        aiodaft.exceptions.RuntimeClosed, match="Echo cannot be spawned: .* not open yet: use `async with"
    ):
        await rt.spawn(Echo)
    actions: list[Callable[[], object]] = [lambda: rt.put(1), rt.scope, lambda: aiodaft.Channel(1)]
    for action in actions:
        with pytest.raises(aiodaft.exceptions.RuntimeClosed, match=r"not open yet|no runtime is open"):
            action()


async def test_a_runtime_says_whose_address_it_was_to_go_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIODAFT_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("AIODAFT_KEY_FILE", str(tmp_path / "absent"))
    with pytest.raises(aiodaft.exceptions.KeyFileError) as told:
        aiodaft.Runtime()
    assert "$AIODAFT_ADDRESS" in told.value.__notes__[0]
    with pytest.raises(aiodaft.exceptions.KeyFileError) as told:
        aiodaft.Runtime("tcp://127.0.0.1:1")
    assert not hasattr(told.value, "__notes__")


def test_a_runtime_without_a_loop_of_asyncio_says_so() -> None:
    """As in trio."""
    with pytest.raises(RuntimeError, match=r"no event loop of asyncio runs here: .*asyncio.run"):
        aiodaft.Runtime().__aenter__().send(None)


async def test_everything_says_that_the_runtime_is_closed() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        echo, streamer = await rt.spawn(Echo), await rt.spawn(Streamer)
        done, channel = echo.echo("kept"), aiodaft.Channel[int](1)
        await done.ready()
    assert "closed" in repr(rt)
    assert await done == "kept"
    calls: list[Callable[[], Any]] = [
        lambda: echo.echo(1),
        lambda: echo.echo.tell(1),
        lambda: streamer.numbers(1),
        lambda: rt.put(1),
        rt.scope,
        lambda: aiodaft.Channel(1),
    ]
    for call in calls:
        with pytest.raises(aiodaft.exceptions.RuntimeClosed):
            call()
    waits: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: awaited(rt.spawn(Echo)),
        lambda: awaited(rt.group(2, Echo)),
        lambda: rt.name(echo, "echo"),
        lambda: rt.lookup("echo", Echo),
        lambda: rt.info(echo),
        lambda: rt.stop(echo),
        lambda: rt.kill(echo),
        rt.nodes,
        rt.__aenter__,
        lambda: channel.send(1),
        channel.recv,
        channel.aclose,
    ]
    for wait in waits:
        async with asyncio.timeout(30):
            with pytest.raises(aiodaft.exceptions.RuntimeClosed):
                await wait()
    await rt.aclose()


def test_without_a_runtime_there_is_none_to_ask_for() -> None:
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="no runtime is open"):
        aiodaft.current_runtime()


def test_an_unknown_transport_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="there is no transport 'pigeon'; there are shm, ucx, tcp"):
        aiodaft.Runtime(preload=(), transport="pigeon")
    monkeypatch.setenv("AIODAFT_TRANSPORT", "carrier")
    with pytest.raises(Exception, match="there is no transport 'carrier'; there are shm, ucx, tcp"):
        aiodaft.Runtime(preload=())
