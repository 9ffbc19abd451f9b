"""The app's answers to probes: whether it is up, and whether its actors answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.info import ANSWERING
from aiodaft.runtime import Runtime
from aiodaft.web.admission import Counts
from aiodaft.web.exchange import Send, answer, answer_with

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
    """The probes of one runtime: a block with the answers to each path."""

    def __init__(self, probes: Probes, rt: Runtime, counts: Counts) -> None:
        self._rt = rt
        self._counts = counts
        self._probes = probes
        self._tasks = TaskOwner("aiodaft web")
        # Requests that come at the same time share a look.
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
