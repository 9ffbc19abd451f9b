"""The layer between a web server and an app: the app's actors, admission, disconnects, and answers to probes."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiodaft._runtime.platform.tasks import TaskOwner, logger, printable
from aiodaft.exceptions import DaftError, DeadlineExceeded, OutcomeUnknown, Overloaded
from aiodaft.overview import ANSWERING
from aiodaft.runtime import Runtime
from aiodaft.web.admission import Admission, Counts, Heap, Outcome, admission_of
from aiodaft.web.exchange import App, Exchange, Receive, Send, answer, answer_with

if TYPE_CHECKING:
    from aiodaft.prometheus import Metrics
    from aiodaft.web.metrics import IngressMetrics


@dataclass(frozen=True, slots=True)
class Probes:
    """Paths that an `Ingress` with actors answers by itself, outside of its limit; None leaves a path to the app.

    Attributes:
        health: Answers 200 as long as the event loop turns.
        ready: Answers 200 if all actors of the runtime answer, else 503, with the names of the others.
        metrics: Answers with the metrics of the runtime and the ingress for Prometheus, for every client. It needs
            prometheus-client (`pip install ".[prometheus]"`).
        patience: Seconds that actors get to answer.
    """

    health: str | None = "/healthz"
    ready: str | None = "/readyz"
    metrics: str | None = None
    patience: float = 1.0


Answer = Callable[[Any, Send], Awaitable[None]]


class RunningProbes(AbstractAsyncContextManager[Mapping[str, Answer]]):
    def __init__(self, probes: Probes, rt: Runtime, counts: Counts) -> None:
        self._rt = rt
        self._counts = counts
        self._probes = probes
        self._tasks = TaskOwner("aiodaft web")
        self._look: asyncio.Task[list[str]] | None = None

    async def __aenter__(self) -> Mapping[str, Answer]:
        probes = self._probes
        answers = {probes.health: self._answer_health, probes.ready: self._answer_ready}
        if probes.metrics is not None:
            from aiodaft.prometheus import Metrics  # noqa: PLC0415 - optional package
            from aiodaft.web.metrics import IngressMetrics  # noqa: PLC0415 - optional package

            metrics = Metrics(self._rt, patience=probes.patience)
            answers[probes.metrics] = partial(_answer_metrics, metrics, IngressMetrics(self._counts))
        return {path: answering for path, answering in answers.items() if path is not None}

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()

    async def _answer_health(self, scope: Any, send: Send) -> None:
        await answer(send, 200, "up\n")

    async def _answer_ready(self, scope: Any, send: Send) -> None:
        if self._look is None or self._look.done():
            self._look = self._tasks.start_ahead(self._look_at_actors(), name="look at all actors")
        not_ready = await asyncio.shield(self._look)
        if not_ready:
            await answer(send, 503, "".join(f"{line}\n" for line in not_ready))
        else:
            await answer(send, 200, "ready\n")

    async def _look_at_actors(self) -> list[str]:
        actors = (await self._rt.overview(patience=self._probes.patience)).actors
        return [f"{actor.name} is {actor.state}" for actor in actors if actor.state not in ANSWERING]


async def _answer_metrics(metrics: Metrics, own: IngressMetrics, scope: Any, send: Send) -> None:
    accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
    body, kind = await metrics.scrape(accept or None, own)
    await answer_with(send, 200, body, kind.encode())


_STARTED: Final = "lifespan.startup.complete"


class Lifespan:
    """The lifespan of a server, between the server and an app, which may have a lifespan of its own.

    The app's begins when `around` has been entered, and ends before `around` is left. Only then is the server told.
    When the app is up, `on_started` is called.
    """

    def __init__(self, receive: Receive, send: Send, on_started: Callable[[], object]) -> None:
        self._receive = receive
        self._send = send
        self._on_started = on_started
        self._received = 0
        self._started = False
        self._last: Any = None

    async def run(self, app: App, scope: Any, around: AbstractAsyncContextManager[object]) -> None:
        """Errors are told to the server, which logs them."""
        try:
            async with around:
                await self._run_app(app, scope)
        except Exception:
            if self._started and self._received < 2:
                raise
            if not self._received:
                await self._receive()
            if self._last is None or not self._last["type"].endswith("failed"):
                phase = "shutdown" if self._started else "startup"
                self._last = {"type": f"lifespan.{phase}.failed", "message": traceback.format_exc()}
        await self._send(self._last)

    async def _run_app(self, app: App, scope: Any) -> None:
        try:
            await app(scope, self._give, self._take)
        except Exception:
            if self._received:
                raise
        if not self._received:
            await self._give()
            await self._take({"type": _STARTED})
            await self._give()
            await self._take({"type": "lifespan.shutdown.complete"})

    async def _give(self) -> Any:
        message = await self._receive()
        self._received += 1
        return message

    async def _take(self, message: Any) -> None:
        if message["type"] == _STARTED:
            self._started = True
            self._on_started()
            await self._send(message)
        else:
            self._last = message


__all__ = ["Ingress"]

Actors = Callable[[Runtime], AbstractAsyncContextManager[Mapping[str, object]]]


def _for_a_server() -> Runtime:
    return Runtime(unhandled="log")


class Ingress:
    """An ASGI middleware for apps that call actors: `app.add_middleware(Ingress, actors=actors, limit=64, queue=256)`.

    It opens a runtime around the lifespan of the app. When a client leaves before its response is complete, it cancels
    the task of the request, and with it the remote calls that are awaited there, also in a stream; that takes up to
    50 ms, and costs nearly nothing for requests of less than 20 ms. It answers 503 with Retry-After if too many
    requests wait, or if the app raises `Overloaded`, or an `OutcomeUnknown` such as `ActorDied`, before it has begun to
    answer; 504 if it raises `DeadlineExceeded`. WebSockets pass through.

    While the app is up, Python's garbage collector leaves alone the objects that were there when it came up
    (`gc.freeze`), and looks at 10,000 new objects together: under load, a fifth of a server's time would go into it.

    Args:
        app: The ASGI app. Starlette's and FastAPI's `add_middleware` gives it; elsewhere, wrap the app.
        actors: Makes the actors in a runtime: an async context manager, whose value is the state of the app. In
            Starlette, FastAPI and Litestar `request.state.NAME` has the value that it yields as `{"NAME": ...}`.
            Default: no runtime is opened.
        runtime: Makes the runtime. Default: `Runtime(unhandled="log")`, since a failed request must not end a server.
        limit: HTTP requests under way at the same time, streams until their end. Default: any number.
        queue: The number of further requests that wait for their turn, in order.
        probes: Paths for those that look after the app.

    Raises:
        ValueError: `limit` is less than 1, `queue` is negative, or is given without `limit`. If it is made when the
            lifespan begins, as by `add_middleware`, the server is told that the app cannot start.
    """

    def __init__(
        self,
        app: App,
        actors: Actors | None = None,
        *,
        runtime: Callable[[], Runtime] = _for_a_server,
        limit: int | None = None,
        queue: int = 0,
        probes: Probes = Probes(),
    ) -> None:
        self._app = app
        self._actors = actors
        self._open_runtime = runtime
        self._admission: Admission | None = None
        self._wrong: ValueError | None = None
        try:
            self._admission = admission_of(limit, queue)
        except ValueError as error:
            if actors is None or asyncio._get_running_loop() is None:
                raise
            # Starlette makes its middleware when the lifespan begins, where uvicorn takes an error for an app without a
            # lifespan, and serves.
            self._wrong = error
        self._probes = probes
        self._heap = Heap()
        self._counts = Counts()
        self._state: Mapping[str, object] | None = None
        self._paths: Mapping[str, Answer] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection of the server, as ASGI says."""
        if scope["type"] == "lifespan":
            if self._actors is None:
                await self._app(scope, receive, send)
            else:
                await Lifespan(receive, send, self._heap.settle).run(self._app, scope, self._open(self._actors, scope))
            return
        if self._actors is not None and self._state is None:
            raise RuntimeError(
                "the actors of this Ingress are not up, because its lifespan was not run: servers run that of the app "
                "that they are given, not of one that is mounted in it, and uvicorn none with --lifespan off"
            ) from self._wrong
        if "state" not in scope:
            # The server does not pass on the state of the lifespan.
            scope["state"] = dict(self._state or {})
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif probe := self._paths.get(scope["path"].removeprefix(scope.get("root_path", ""))):
            await probe(scope, send)
        else:
            await self._serve(scope, receive, send)

    @asynccontextmanager
    async def _open(self, actors: Actors, scope: Any) -> AsyncGenerator[None, None]:
        if self._wrong is not None:
            raise self._wrong
        async with (
            self._open_runtime() as rt,
            actors(rt) as state,
            RunningProbes(self._probes, rt, self._counts) as paths,
        ):
            self._state, self._paths = state, paths
            scope.setdefault("state", {}).update(state)
            try:
                yield
            finally:
                self._heap.unsettle()
                self._state, self._paths = None, {}

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        exchange, counts, clock = Exchange(receive, send, task), self._counts, asyncio.get_running_loop().time
        ended_for_client = False
        outcome: Outcome = "failed"
        began = clock()
        counts.begun += 1
        try:
            try:
                await self._admit(scope, exchange)
                outcome = "answered"
            finally:
                ended_for_client = exchange.end() or exchange.given_up
            if exchange.given_up:
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            if not ended_for_client:
                raise
            outcome = "left"
            # nginx's status reaches nobody, but apps are to answer.
            status, why = (408, "sent no body") if exchange.given_up else (499, "left")
            logger.debug("the client of %r %s", scope["path"], why)
            if not exchange.started:
                await answer(send, status, f"the client {why}")
        except (Overloaded, DeadlineExceeded, OutcomeUnknown) as error:
            if exchange.started:
                raise
            outcome = await self._answer_failed(error, scope, send)
        finally:
            counts.end(outcome, clock() - began)

    async def _answer_failed(self, error: DaftError, scope: Any, send: Send) -> Outcome:
        """Answer for a call that failed, for no fault of the app, and log a line.

        The error names actors, processes and hosts, which are no business of clients.
        """
        outcome: Outcome = "lost"
        level, status, wait, text = logging.WARNING, 503, 1, "unavailable"
        match error:
            case Overloaded():
                wait = 1 if self._admission is None else self._admission.retry_after
                outcome, level, text = "refused", logging.DEBUG, "overloaded"
            case DeadlineExceeded():
                outcome, status, wait, text = "late", 504, 0, "too late"
        said = printable(f"{type(error).__name__}: {error}").partition("\n")[0]
        logger.log(level, "%r is answered by %d: %.500s", scope["path"], status, said)
        if wait:
            await answer(send, status, f"{text}: come back in {wait} s", (b"retry-after", str(wait).encode()))
        else:
            await answer(send, status, text)
        return outcome

    async def _admit(self, scope: Any, exchange: Exchange) -> None:
        if self._admission is None:
            await self._app(scope, exchange.receive, exchange.send)
            return
        self._counts.waiting += 1
        try:
            await self._admission.enter(exchange)
        finally:
            self._counts.waiting -= 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._admission.leave(exchange)
