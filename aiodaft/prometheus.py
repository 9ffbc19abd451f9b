"""Metrics of a runtime for Prometheus, from `rt.overview()`: a call that succeeds does nothing for them.

Needs the package prometheus-client (`pip install ".[prometheus]"`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from aiodaft.exceptions import DaftError
from aiodaft.overview import ANSWERING, ActorInfo, Flow, NodeInfo, Overview, ProcessInfo
from aiodaft.runtime import Runtime

__all__ = ["Metrics"]

_STATES: Final = (*ANSWERING, "silent", "restarting", "dead")

Samples = Iterable[tuple[Sequence[str], float]]


class _Family(NamedTuple):
    """A metric.

    Attributes:
        name: Its name, without the common prefix.
        help: Its description.
        value: Gives its value.
        join: Joins the values of samples with equal labels.
        always: Whether it is known also of a process that does not answer: else a counter would seem to begin again.
        is_counter: Whether it only grows.
    """

    name: str
    help: str
    value: Callable[..., float] = float
    join: Callable[[float, float], float] = lambda one, other: one + other
    always: bool = False
    is_counter: bool = False


def _counter(name: str, text: str, value: Callable[..., float]) -> _Family:
    return _Family(name, text, value, is_counter=True)


_OF_ACTORS: Final = (
    _counter("actor_calls", "Calls that have ended, since the process of the actor began.", lambda one: one.done),
    _counter("actor_failed_calls", "Calls, and steps of graphs, that raised.", lambda one: one.failed),
    _counter("actor_restarts", "Successful restarts.", lambda one: one.restarts)._replace(always=True),
    _Family("actor_queued_calls", "Calls that wait in the mailbox.", lambda one: one.queued),
    _Family("actor_running_calls", "Calls that run.", lambda one: len(one.running) + one.running_besides),
    _Family("actor_abandoned_calls", "Calls that run although they were given up.", lambda one: one.abandoned),
)
_OF_PROCESSES: Final = (
    _Family("process_up", "1 if the process answered in time, else 0.", lambda one: one.answered, min, always=True),
    _Family("process_silent_seconds", "Since the last sign of life.", lambda one: one.silent_for, max, always=True),
    _Family("process_loop_lag_seconds", "Seconds without a turn.", lambda one: one.loop_lag, max, always=True),
    _Family("process_resident_bytes", "Memory in RAM, with shared pages.", lambda one: one.rss),
    _counter("process_cpu_seconds", "CPU time.", lambda one: one.cpu_seconds),
    _Family("process_threads", "Python threads.", lambda one: one.threads),
    _Family("process_stored_bytes", "Bytes of values stored for others.", lambda one: one.stored_bytes),
    _Family("process_stored_values", "Values stored for others.", lambda one: one.stored_values),
    _Family("process_late_collectives", "Collectives that members are late for.", lambda one: len(one.late)),
    _Family("process_pooled_bytes", "Memory kept for values to come.", lambda one: one.pooled_bytes),
)
_OF_FLOWS: Final = (
    _counter("flow_calls", "Calls from source to target that have ended.", lambda one: one.calls),
    _counter("flow_bytes", "Bytes from source to target.", lambda one: one.bytes),
)


class Metrics(Collector):
    """Metrics of a runtime: of its actors, processes and nodes, on all machines.

    An app serves them by `scrape`. A server of prometheus-client has them with `REGISTRY.register(metrics)`; it shows
    the runtime as it was at the scrape before, because it cannot wait for actors.

    Args:
        rt: The runtime; make this on its event loop.
        patience: Seconds that processes get to answer. One that does not has `aiodaft_process_up` 0.
        flows: Whether to have metrics of each pair of processes that send to each other.
    """

    def __init__(self, rt: Runtime, *, patience: float = 1.0, flows: bool = False) -> None:
        self._rt = rt
        self._patience = patience
        self._flows = flows
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._last: Overview | None = None
        self._refreshing: Future[None] | None = None

    async def refresh(self) -> None:
        """Look at the runtime. Looks at the same time are one.

        Raises:
            RuntimeClosed: The runtime is closed.

        Cancellation: nothing is lost.
        """
        seen = self._last
        async with self._turn:
            if self._last is seen:
                self._last = await self._rt.overview(patience=self._patience)

    async def scrape(self, accept: str | None = None, *others: Collector) -> tuple[bytes, str]:
        """The metrics as they are now, in no more than about `patience` seconds.

        Args:
            accept: The header Accept of the request.
            others: More metrics for the same answer, such as a registry of the program.

        Returns:
            The body of the answer, and its Content-Type: OpenMetrics if that is accepted, else text of Prometheus.

        Raises:
            RuntimeClosed: The runtime is closed.

        Cancellation: nothing is lost.
        """
        await self.refresh()
        encode, content_type = choose_encoder(accept or "")
        registry = CollectorRegistry(auto_describe=False)
        for collector in (_Seen(self._seen()), *others):
            registry.register(collector)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """The metrics as they were when this was called before; has the loop look at the runtime. Never waits."""
        if self._refreshing is None or self._refreshing.done():
            coro = self.refresh()
            try:
                self._refreshing = asyncio.run_coroutine_threadsafe(coro, self._loop)
            except RuntimeError:
                coro.close()
                self._last = None
            else:
                self._refreshing.add_done_callback(self._refreshed)
        return iter(self._seen())

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are is known when actors are."""
        return []

    def _refreshed(self, refreshing: Future[None]) -> None:
        with suppress(Exception):
            if isinstance(refreshing.exception(), DaftError):
                self._last = None

    def _seen(self) -> list[Metric]:
        return [] if self._last is None else list(_metrics(self._last, flows=self._flows))


class _Seen(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _metrics(seen: Overview, *, flows: bool) -> Iterator[Metric]:
    actor_labels = "actor", "class", "node"
    for family in _OF_ACTORS:
        actors = [one for one in seen.actors if family.always or one.state in ANSWERING]
        yield _metric(family, actor_labels, [(_labels_of_actor(one), family.value(one)) for one in actors])
    state = _Family("actor_state", "1 for the state that the actor is in, else 0.", join=max)
    states = [((*_labels_of_actor(one), name), one.state == name) for one in seen.actors for name in _STATES]
    yield _metric(state, (*actor_labels, "state"), states)
    process_labels = "process", "role", "node"
    for family in _OF_PROCESSES:
        processes = [one for one in seen.processes if family.always or one.answered]
        yield _metric(family, process_labels, [(_labels_of_process(one), family.value(one)) for one in processes])
    deaths = _counter("deaths", "Processes of actors that ended by accident.", float)
    dead = [((name, one.node), count) for one in seen.processes for name, count in one.deaths]
    yield _metric(deaths, ("class", "node"), dead)
    yield from _traffic([one for one in seen.processes if one.answered], process_labels)
    yield from _nodes(seen.nodes)
    for family in _OF_FLOWS if flows else ():
        samples = [(_labels_of_flow(seen, one), family.value(one)) for one in seen.flows]
        yield _metric(family, ("source", "target"), samples)
    taken = _Family("overview_timestamp_seconds", "When these metrics were taken, since the epoch.")
    yield _metric(taken, (), [((), seen.taken)])


def _traffic(processes: Sequence[ProcessInfo], labels: Sequence[str]) -> Iterator[Metric]:
    for way in ("sent", "received"):
        family = _counter(f"process_{way}_bytes", "Control messages, and payload: large values.", float)
        samples = [
            ((*_labels_of_process(one), kind), float(getattr(one.traffic, f"{kind}_{way}")))
            for one in processes
            for kind in ("control", "payload")
        ]
        yield _metric(family, (*labels, "kind"), samples)


def _nodes(nodes: Sequence[NodeInfo]) -> Iterator[Metric]:
    ready = _Family("node_ready", "1 if the node takes new actors, else 0.")
    yield _metric(ready, ("node",), [((one.name,), one.state == "ready") for one in nodes])
    shares = _Family("node_actors", "Shares of its resources in use.")
    yield _metric(shares, ("node",), [((one.name,), one.actors) for one in nodes])
    for what, amounts in (("capacity", "total"), ("free", "free")):
        family = _Family(f"node_resource_{what}", "CPUs, GPUs and other resources.")
        samples = [((one.name, name), float(have)) for one in nodes for name, have in getattr(one, amounts).items()]
        yield _metric(family, ("node", "resource"), samples)


def _labels_of_actor(actor: ActorInfo) -> tuple[str, ...]:
    return actor.name, actor.class_name, actor.node


def _labels_of_process(process: ProcessInfo) -> tuple[str, ...]:
    # Not its id, which the next incarnation does not have.
    return process.title, process.role, process.node


def _labels_of_flow(seen: Overview, flow: Flow) -> tuple[str, ...]:
    return seen.title(flow.source), seen.title(flow.target)


def _metric(family: _Family, labels: Sequence[str], samples: Samples) -> Metric:
    """A metric. Names of actors are unique for their owner alone: samples with equal labels are joined."""
    joined: dict[Sequence[str], float] = {}
    for values, value in samples:
        joined[values] = float(value if values not in joined else family.join(joined[values], value))
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    metric = kind(f"aiodaft_{family.name}", family.help, labels=labels)
    for values, value in joined.items():
        metric.add_metric(values, value)
    return metric
