"""Metrics of a runtime, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from actors import Echo, Sleeper, Trainer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from supervised import Mortal

import aiodaft
from aiodaft.prometheus import Metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str, read: Any = read_text) -> Found:
    """The samples of an answer, by name and labels."""
    found = [sample for family in read(text) for sample in family.samples]
    by_key = {(one.name, frozenset(one.labels.items())): one.value for one in found}
    # Prometheus refuses two with the same labels.
    assert len(by_key) == len(found)
    return by_key


async def scrape(metrics: Metrics) -> Found:
    body, content_type = await metrics.scrape()
    assert content_type.startswith("text/plain")
    return samples(body.decode())


def value(found: Found, name: str, **labels: str) -> float:
    """The only sample of a name with these labels, and perhaps others."""
    (one,) = [value for (key, its), value in found.items() if key == name and labels.items() <= set(its)]
    return one


async def test_a_scrape_has_the_actors_processes_and_nodes_as_they_are(module_rt: aiodaft.Runtime) -> None:
    metrics = Metrics(module_rt, flows=True)
    echo, sleeper = await module_rt.spawn(Echo), await module_rt.spawn(Sleeper)
    name, other = (await module_rt.info(echo)).name, (await module_rt.info(sleeper)).name
    for _ in range(3):
        await echo.echo(bytes(1 << 20))
    failing = await module_rt.spawn(Trainer, 0.1)
    with pytest.raises(ValueError, match="this member fails"):
        await failing.fail_if(bad=True)
    blocked = sleeper.block(20)
    while value(found := await scrape(metrics), "aiodaft_actor_running_calls", actor=other) < 1:
        pass
    assert value(found, "aiodaft_actor_calls_total", actor=name, **{"class": "Echo"}) == 3
    assert value(found, "aiodaft_actor_failed_calls_total", **{"class": "Trainer"}) == 1
    assert value(found, "aiodaft_actor_state", actor=other, state="busy") == 1
    assert value(found, "aiodaft_actor_state", actor=name, state="idle") == 1
    assert value(found, "aiodaft_process_up", process=name) == 1
    assert value(found, "aiodaft_process_resident_bytes", process=name, role="worker") > 1 << 20
    assert value(found, "aiodaft_process_received_bytes_total", process=name, kind="payload") >= 3 << 20
    assert value(found, "aiodaft_flow_calls_total", source="the controller", target=name) == 3
    assert value(found, "aiodaft_flow_bytes_total", source="the controller", target=name) >= 3 << 20
    assert value(found, "aiodaft_node_resource_capacity", resource="gpus") == 4
    assert value(found, "aiodaft_overview_timestamp_seconds") > 1e9
    await sleeper.unblock()
    await blocked
    body, content_type = await metrics.scrape("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert value(samples(body.decode(), read_openmetrics), "aiodaft_actor_calls_total", actor=name) == 3


async def test_names_that_several_owners_give_are_joined(module_rt: aiodaft.Runtime) -> None:
    # Groups in one process have a process in common; its actors are there once each.
    async with module_rt.group(2, Echo) as group, module_rt.on(with_=group).group(2, Sleeper):
        found = await scrape(Metrics(module_rt))
        processes = {dict(its)["process"] for key, its in found if key == "aiodaft_process_up"}
        assert sum(" and " in process for process in processes) == 2


async def test_a_process_that_is_stopped_delays_no_scrape_and_its_counters_do_not_begin_again(
    module_rt: aiodaft.Runtime,
) -> None:
    metrics = Metrics(module_rt, patience=0.2)
    echo = await module_rt.spawn(Echo)
    info = await module_rt.info(echo)
    await echo.echo(1)
    os.kill(info.pid, signal.SIGSTOP)
    try:
        several = await asyncio.gather(*(scrape(metrics) for _ in range(10)))
    finally:
        os.kill(info.pid, signal.SIGCONT)
    for found in several:
        assert value(found, "aiodaft_process_up", process=info.name) == 0
        # With the labels that it had before.
        who = {"actor": info.name, "class": "Echo", "node": info.node}
        assert value(found, "aiodaft_actor_state", state="silent", **who) == 1
        gone = {key for key, its in found if ("actor", info.name) in its or ("process", info.name) in its}
        assert gone.isdisjoint({"aiodaft_actor_calls_total", "aiodaft_process_cpu_seconds_total"})
    assert value(await scrape(metrics), "aiodaft_actor_calls_total", actor=info.name) == 1


async def test_an_actor_that_died_for_good_is_dead(module_rt: aiodaft.Runtime) -> None:
    dying = await module_rt.spawn(Mortal)
    info = await module_rt.info(dying)
    with pytest.raises(aiodaft.ActorDied):
        await dying.die()
    found = await scrape(Metrics(module_rt))
    # With the labels that it had before.
    who = {"actor": info.name, "class": "Mortal", "node": info.node}
    assert {state: value(found, "aiodaft_actor_state", state=state, **who) for state in ("idle", "dead")} == {
        "idle": 0, "dead": 1,
    }  # fmt: skip
    await module_rt.stop(dying)
    assert not any(("actor", info.name) in its for _, its in await scrape(Metrics(module_rt)))


async def test_deaths_are_counted_by_class_and_node(module_rt: aiodaft.Runtime) -> None:
    metrics, dying = Metrics(module_rt), await module_rt.spawn(Sleeper)
    info = await module_rt.info(dying)
    sleeping = dying.block(20)
    os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied):
        await sleeping
    assert value(await scrape(metrics), "aiodaft_deaths_total", **{"class": "Sleeper", "node": info.node}) == 1
    # Of one that was stopped, nothing died.
    await module_rt.stop(await module_rt.spawn(Sleeper))
    assert value(await scrape(metrics), "aiodaft_deaths_total", **{"class": "Sleeper", "node": info.node}) == 1


@pytest.fixture
def registry() -> Iterator[tuple[CollectorRegistry, str]]:
    """A registry, and where a server has its metrics."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield registry, f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_server_of_prometheus_client_has_them_without_waiting_for_the_loop(
    module_rt: aiodaft.Runtime, registry: tuple[CollectorRegistry, str]
) -> None:
    await module_rt.spawn(Echo)
    metrics = Metrics(module_rt)
    registry[0].register(metrics)

    def read() -> Found:
        with urllib.request.urlopen(registry[1], timeout=20) as answer:
            return samples(answer.read().decode())

    # Before the loop has had a turn.
    assert list(metrics.collect()) == []
    while not (found := await asyncio.to_thread(read)):
        pass
    assert any(key == "aiodaft_actor_calls_total" for key, _ in found)


async def test_metrics_end_with_their_runtime() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        metrics = Metrics(rt)
        await metrics.refresh()
        assert list(metrics.collect())
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await metrics.scrape()
    while list(metrics.collect()):
        await asyncio.sleep(0)
