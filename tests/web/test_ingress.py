"""Requests between a server and an app: the cancelled requests when a client leaves, and the answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgi_server import FakeServer
from starlette.applications import Starlette

import aiodaft
from aiodaft.testing import AutojumpLoop
from aiodaft.testing.in_process import in_process
from aiodaft.web import Ingress
from aiodaft.web.admission import OUTCOMES, Counts, Outcome
from aiodaft.web.exchange import lasting_requests
from aiodaft.web.metrics import IngressMetrics

GET = {"body": b"", "more_body": False}


class Request:
    """A request to an app whose work is told by its events."""

    def __init__(self, handle: Callable[[Request], Awaitable[None]], **options: Any) -> None:
        self.server = FakeServer()
        self.events: list[Any] = []
        self._handle = handle
        self._ingress = Ingress(self._app, **options)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.receive, self.send = receive, send
        await self._handle(self)

    async def work(self) -> None:
        """Does not end by itself."""
        self.events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")

    def come(self, server: FakeServer) -> asyncio.Task[None]:
        """One more request to the same app."""
        scope = {"type": "http", "path": "/"}
        return asyncio.get_running_loop().create_task(self._ingress(scope, server.receive, server.send))

    async def begin(self) -> asyncio.Task[None]:
        task = self.come(self.server)
        while not self.events:
            await asyncio.sleep(0)
        return task


async def watched(request: Request) -> None:
    """Wait until the ingress takes the server's messages for the app."""
    request.server.put("http.request", **GET)
    while request.server.unread:
        await asyncio.sleep(0)


async def test_a_client_that_leaves_cancels_the_task_and_only_once() -> None:
    request = Request(Request.work)
    task = await request.begin()
    await watched(request)
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began", "cancelled"]
    assert task.cancelling() == 0
    assert [message.get("status") for message in request.server.sent] == [499, None]


async def test_an_app_that_receives_by_itself_is_cancelled_there() -> None:
    async def handle(request: Request) -> None:
        request.events.append("began")
        await request.receive()
        request.events.append(await request.receive())

    request = Request(handle)
    request.server.put("http.request", **GET)
    task = await request.begin()
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began"]


async def test_another_task_of_the_app_is_told_of_the_disconnect() -> None:
    async def handle(request: Request) -> None:
        async def listen() -> None:
            for _ in range(3):
                request.events.append((await request.receive())["type"])

        async with asyncio.TaskGroup() as group:
            listener = group.create_task(listen())
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.wait([listener])

    request = Request(handle)
    request.server.put("http.request", **GET)
    task = await request.begin()
    request.server.put("http.disconnect")
    await task
    # A server may give it only once.
    assert request.events == ["http.request", "http.disconnect", "http.disconnect"]


class Look:
    """Waits, as a request does, until the clients of all requests before it have been looked at."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        lasting_requests().add(self)

    def watch(self, tasks: object) -> bool:
        self.done.set()
        return True


@pytest.mark.parametrize("is_watched", [False, True])
async def test_an_app_that_listens_in_another_task_ends_its_work_by_itself(is_watched: bool) -> None:
    listen, clean_up = asyncio.Event(), asyncio.Event()

    async def handle(request: Request) -> None:
        async def work() -> None:
            try:
                await request.work()
            finally:
                await clean_up.wait()
                request.events.append("cleaned up")

        async def listener() -> None:
            await listen.wait()
            while (await request.receive())["type"] != "http.disconnect":
                pass

        # As Quart and Django do. A cancellation here would leave the work running.
        tasks = [asyncio.get_running_loop().create_task(one()) for one in (listener, work)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[1].cancel()
        await asyncio.wait(tasks)

    request = Request(handle)
    if not is_watched:
        listen.set()
    task = await request.begin()
    await watched(request)
    listen.set()
    await asyncio.sleep(0)
    request.server.put("http.disconnect")
    while "cancelled" not in request.events:
        await asyncio.sleep(0)
    await Look().done.wait()
    clean_up.set()
    await task
    assert request.events == ["began", "cancelled", "cleaned up"]


async def test_a_body_that_comes_while_the_app_does_something_else_is_not_lost() -> None:
    go_on = asyncio.Event()

    async def handle(request: Request) -> None:
        request.events.append("began")
        await go_on.wait()
        request.events += [(await request.receive())["body"] for _ in range(3)]
        await request.work()

    request = Request(handle)
    task = await request.begin()
    for piece in (b"a", b"b"):
        request.server.put("http.request", body=piece, more_body=True)
    request.server.put("http.request", body=b"c", more_body=False)
    while request.server.unread == 3:
        await asyncio.sleep(0)
    # One piece is kept; the server holds back the others.
    assert request.server.unread == 2
    go_on.set()
    while "began" not in request.events[1:]:
        await asyncio.sleep(0)
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began", b"a", b"b", b"c", "began", "cancelled"]


async def test_an_app_that_waits_for_a_message_while_its_client_is_watched_gets_it() -> None:
    ask = asyncio.Event()

    async def handle(request: Request) -> None:
        request.events.append("began")
        await ask.wait()
        request.events.append((await request.receive())["body"])
        request.events.append("waits")
        await request.receive()

    request = Request(handle)
    task = await request.begin()
    await watched(request)
    ask.set()
    while "waits" not in request.events:
        await asyncio.sleep(0)
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began", b"", "waits"]


async def test_a_wait_for_a_message_that_is_cancelled_loses_none() -> None:
    async def handle(request: Request) -> None:
        request.events.append("began")
        for _ in range(100):
            try:
                async with asyncio.timeout(0):
                    await request.receive()
            except TimeoutError:
                # As a handler that asks again and again whether its client is there.
                await asyncio.sleep(0.001)
        request.events.append(await request.receive())

    request = Request(handle)
    task = await request.begin()
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began"]


async def test_what_an_app_does_after_its_response_is_not_cancelled() -> None:
    end = asyncio.Event()

    async def handle(request: Request) -> None:
        await request.send({"type": "http.response.start", "status": 200})
        await request.send({"type": "http.response.body", "body": b"all"})
        request.events.append("answered")
        assert (await request.receive())["type"] == "http.request"
        assert (await request.receive())["type"] == "http.disconnect"
        await end.wait()
        request.events.append("cleaned up")

    request = Request(handle)
    task = await request.begin()
    request.server.put("http.request", **GET)
    request.server.put("http.disconnect")
    while request.server.unread:
        await asyncio.sleep(0)
    end.set()
    await task
    assert request.events == ["answered", "cleaned up"]


async def test_a_stream_that_has_begun_is_cancelled_and_not_answered_again() -> None:
    async def handle(request: Request) -> None:
        await request.send({"type": "http.response.start", "status": 200})
        await request.send({"type": "http.response.body", "body": b"first", "more_body": True})
        await request.work()

    request = Request(handle)
    task = await request.begin()
    await watched(request)
    request.server.put("http.disconnect")
    await task
    assert request.server.kinds == ["http.response.start", "http.response.body"]


async def test_a_cancellation_by_the_server_passes() -> None:
    request = Request(Request.work)
    task = await request.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.server.sent == []


async def test_an_app_that_goes_on_after_its_cancellation_ends_by_itself() -> None:
    async def handle(request: Request) -> None:
        try:
            await request.work()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            request.events.append("saved")

    request = Request(handle)
    task = await request.begin()
    request.server.put("http.disconnect")
    await task
    assert request.events == ["began", "cancelled", "saved"]
    assert task.cancelling() == 0


async def test_a_request_in_the_queue_whose_client_leaves_leaves_the_queue() -> None:
    request = Request(Request.work, limit=1, queue=1)
    waits, refused, waits_then = FakeServer(), FakeServer(), FakeServer()
    task = await request.begin()
    waiting = request.come(waits)
    await request.come(refused)
    assert [message.get("status") for message in refused.sent] == [503, None]
    waits.put("http.disconnect")
    await waiting
    assert request.events == ["began"]
    waiting = request.come(waits_then)
    request.server.put("http.disconnect")
    await task
    while request.events != ["began", "cancelled", "began"]:
        await asyncio.sleep(0)
    waits_then.put("http.disconnect")
    await waiting
    assert [message.get("status") for message in waits_then.sent] == [499, None]


async def test_overload_after_the_response_has_begun_is_an_error_of_the_app() -> None:
    async def handle(request: Request) -> None:
        request.events.append("began")
        await request.send({"type": "http.response.start", "status": 200})
        raise aiodaft.Overloaded("too many calls")

    with pytest.raises(aiodaft.Overloaded):
        await (await Request(handle).begin())


@pytest.mark.parametrize("listens", [False, True])
def test_a_client_that_sends_no_body_holds_no_place_that_another_waits_for(listens: bool) -> None:
    async def read(request: Request) -> None:
        request.events.append("began")
        while (await request.receive()).get("more_body", False):
            pass

    async def handle(request: Request) -> None:
        if not listens or request.events:
            await read(request)
        else:
            # As Quart does.
            tasks = [asyncio.get_running_loop().create_task(one) for one in (read(request), request.work())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks[1].cancel()
            await asyncio.wait(tasks)

    async def main() -> None:
        request = Request(handle, limit=1, queue=1)
        request.server.put("http.request", body=b"x", more_body=True)
        stalled = await request.begin()
        other = FakeServer()
        other.put("http.request", **GET)
        await request.come(other)
        await stalled
        assert [message.get("status") for message in request.server.sent] == [408, None]
        assert request.events == (["began", "began", "cancelled", "began"] if listens else ["began", "began"])

    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (aiodaft.DeadlineExceeded("Model.step of Model-1: late\nforged: line"), 504, b"too late"),
        (aiodaft.ActorDied("Model-1 (pid 7) died"), 503, b"unavailable: come back in 1 s"),
        (aiodaft.exceptions.PeerLost("Model-1 does not answer"), 503, b"unavailable: come back in 1 s"),
    ],
)
async def test_a_call_that_failed_for_no_fault_of_the_app_is_one_line_of_the_log(
    error: aiodaft.DaftError, status: int, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: Request) -> None:
        request.events.append("began")
        error.add_note("the last lines of the actor\n" * 90)
        raise error

    request = Request(handle)
    await (await request.begin())
    assert [message.get("status") for message in request.server.sent] == [status, None]
    assert request.server.sent[1]["body"] == text
    assert (b"retry-after", b"1") in request.server.sent[0]["headers"] or status == 504
    said = f"'/' is answered by {status}: {type(error).__name__}: {str(error).splitlines()[0]}"
    assert [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("WARNING", said, None)
    ]


async def test_what_an_ingress_holds_answers_and_refuses_is_counted() -> None:
    counts = Counts()
    counts.begun = 6
    counts.waiting = 1
    ended: list[tuple[Outcome, float]] = [("answered", 0.02), ("answered", 0.2), ("lost", 20.0), ("refused", 0.0)]
    for one in ended:
        counts.end(*one)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in IngressMetrics(counts).collect()
        for sample in metric.samples
    }
    requests, seconds = "aiodaft_ingress_requests_total", "aiodaft_ingress_request_seconds"
    assert [found[requests, one] for one in OUTCOMES] == [2, 1, 0, 1, 0, 0]
    assert found["aiodaft_ingress_held_requests", "running"] == found["aiodaft_ingress_held_requests", "waiting"] == 1
    assert [found[f"{seconds}_bucket", bound] for bound in ("0.01", "0.025", "0.1", "0.25", "10.0", "+Inf")] == [
        0, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert (found[f"{seconds}_count",], found[f"{seconds}_sum",]) == (3, pytest.approx(20.22))


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_connections_pass_through(kind: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], receive, send))

    server = FakeServer()
    receive, send = server.receive, server.send
    await Ingress(app)({"type": kind}, receive, send)
    assert seen == [(kind, receive, send)]


@asynccontextmanager
async def no_actors(rt: aiodaft.Runtime) -> AsyncGenerator[dict[str, object], None]:
    yield {}


async def test_an_ingress_whose_lifespan_was_not_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="its lifespan was not run"):
        await Ingress(lasting_app, no_actors)({"type": "http"}, FakeServer().receive, FakeServer().send)


@pytest.mark.parametrize("frozen", [False, True])
async def test_garbage_is_looked_for_in_what_came_since_the_app_is_up(frozen: bool) -> None:
    server, found = FakeServer(), list[tuple[bool, int]]()
    before = gc.get_threshold()
    gc.collect()
    gc.unfreeze()
    if frozen:
        # By a server that forks, say: that stays.
        gc.freeze()
    made = [[] for _ in range(1000)]
    count = gc.get_freeze_count()

    def look() -> None:
        found.append((gc.get_freeze_count() - count >= len(made), gc.get_threshold()[0]))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        look()
        await send({"type": "lifespan.startup.complete"})
        look()
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    server.put("lifespan.startup")
    server.put("lifespan.shutdown")
    try:
        await Ingress(app, no_actors, runtime=in_process)({"type": "lifespan"}, server.receive, server.send)
        look()
        assert found == [(False, before[0]), (True, max(10_000, before[0])), (frozen, before[0])]
        assert gc.get_threshold() == before
    finally:
        gc.freeze()


async def lasting_app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


@pytest.mark.parametrize("ends_first", [0, 1])
async def test_the_garbage_collector_is_as_before_when_the_last_of_two_apps_ends(ends_first: int) -> None:
    before = gc.get_threshold()
    gc.unfreeze()
    servers, lives = (FakeServer(), FakeServer()), list[asyncio.Task[None]]()
    try:
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                server.put("lifespan.startup")
                ingress = Ingress(lasting_app, no_actors, runtime=in_process)
                lives.append(tasks.create_task(ingress({"type": "lifespan"}, server.receive, server.send)))
                await server.has_sent("lifespan.startup.complete")
            servers[ends_first].put("lifespan.shutdown")
            await lives[ends_first]
            assert gc.get_freeze_count()
            assert gc.get_threshold()[0] >= 10_000
            servers[1 - ends_first].put("lifespan.shutdown")
        assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
    finally:
        gc.set_threshold(*before)
        gc.freeze()


async def test_a_garbage_collector_that_is_off_stays_off() -> None:
    server, before = FakeServer(), gc.get_threshold()
    ingress = Ingress(lasting_app, no_actors, runtime=in_process)
    server.put("lifespan.startup")
    gc.set_threshold(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ingress({"type": "lifespan"}, server.receive, server.send))
            await server.has_sent("lifespan.startup.complete")
            assert gc.get_threshold()[0] == 0
            server.put("lifespan.shutdown")
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


async def test_an_app_that_is_given_a_wrong_limit_does_not_start() -> None:
    @asynccontextmanager
    async def actors(_rt: aiodaft.Runtime) -> AsyncGenerator[dict[str, object]]:
        yield {}

    # Starlette makes the ingress in the lifespan, where an error may count as that of an app without a lifespan.
    app, server = Starlette(), FakeServer()
    app.add_middleware(Ingress, actors=actors, limit=0)
    server.put("lifespan.startup")
    await app({"type": "lifespan", "app": app}, server.receive, server.send)
    assert server.kinds == ["lifespan.startup.failed"]
    assert "limit=0: a whole number that is at least 1 is needed" in server.sent[0]["message"]


def test_a_wrong_limit_is_an_error_where_the_ingress_is_made() -> None:
    with pytest.raises(ValueError, match="queue=3 without a limit"):
        Ingress(Starlette(), queue=3)
