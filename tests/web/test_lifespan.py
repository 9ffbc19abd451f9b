"""The actors of an app live around the lifespan of the app itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from asgi_server import FakeServer

from aiodaft.web.ingress import Lifespan

STARTED, STOPPED = "lifespan.startup.complete", "lifespan.shutdown.complete"


class Story:
    """The events, in order."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.events: list[str] = []

    @asynccontextmanager
    async def around(self, failing: str = "") -> AsyncGenerator[None, None]:
        await self._step("actors begin", failing)
        try:
            yield
        finally:
            await self._step("actors end", failing)

    async def _step(self, event: str, failing: str) -> None:
        await asyncio.sleep(0)
        self.events += [event, f"server told of {self.server.kinds}"]
        if event == failing:
            raise OSError(event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        self.events.append("app begins")
        await send({"type": STARTED})
        assert (await receive())["type"] == "lifespan.shutdown"
        self.events.append("app ends")
        await send({"type": STOPPED})

    def lifespan(self) -> Lifespan:
        on_started = partial(self.events.append, "all is up")
        return Lifespan(self.server.receive, self.server.send, on_started)

    async def run(self, app: Any, failing: str = "") -> None:
        self.server.put("lifespan.startup")
        self.server.put("lifespan.shutdown")
        await self.lifespan().run(app, {}, self.around(failing))


async def test_the_app_lives_within_its_actors_and_the_server_hears_when_both_have_begun_and_ended() -> None:
    story = Story()
    await story.run(story.app)
    assert story.events == [
        "actors begin",
        "server told of []",
        "app begins",
        "all is up",
        "app ends",
        "actors end",
        f"server told of {[STARTED]}",
    ]
    assert story.server.kinds == [STARTED, STOPPED]


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError("only http")


async def ignores(scope: Any, receive: Any, send: Any) -> None:
    return


@pytest.mark.parametrize("app", [refuses, ignores])
async def test_an_app_without_a_lifespan_of_its_own_has_actors(app: Any) -> None:
    story = Story()
    await story.run(app)
    assert story.events == [
        "actors begin",
        "server told of []",
        "all is up",
        "actors end",
        f"server told of {[STARTED]}",
    ]
    assert story.server.kinds == [STARTED, STOPPED]


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("actors begin", ["lifespan.startup.failed"]),
        ("actors end", [STARTED, "lifespan.shutdown.failed"]),
    ],
)
async def test_the_server_is_told_why_actors_could_not_begin_or_end(failing: str, told: list[str]) -> None:
    story = Story()
    await story.run(story.app, failing)
    assert story.server.kinds == told
    assert story.server.sent[-1]["message"].rstrip().endswith(f"OSError: {failing}")


async def test_an_app_that_fails_to_begin_ends_its_actors_before_the_server_hears_of_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no such file"})
        raise OSError("no such file")

    story = Story()
    await story.run(app)
    assert story.events[-1] == "server told of []"
    assert story.server.sent == [{"type": "lifespan.startup.failed", "message": "no such file"}]


async def test_an_app_that_fails_without_a_word_is_told_of() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise OSError("no such file")

    story = Story()
    await story.run(app)
    assert story.server.kinds == ["lifespan.startup.failed"]


async def test_an_app_whose_lifespan_breaks_off_ends_its_actors_and_fails() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": STARTED})
        raise OSError("broke off")

    story = Story()
    with pytest.raises(OSError, match="broke off"):
        await story.run(app)
    assert story.server.kinds == [STARTED]


async def test_a_cancelled_lifespan_ends_its_actors() -> None:
    story = Story()
    story.server.put("lifespan.startup")
    lifespan = story.lifespan()
    task = asyncio.get_running_loop().create_task(lifespan.run(story.app, {}, story.around()))
    await story.server.has_sent(STARTED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "actors end" in story.events
