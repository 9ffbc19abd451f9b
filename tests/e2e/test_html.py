"""The views of runtimes, groups, refs and errors in notebooks: from this process's knowledge, without waiting."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from actors import Echo, Sleeper
from failing import Failing
from html_page import Page
from relay_actors import Source

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


FORGED = '<script>alert("1")</script>'


def shown(thing: Any) -> Page:
    return Page(thing._repr_html_())


async def test_a_runtime_and_a_scope_show_their_actors_and_how_they_are(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    followed = await rt.on(restart=aiodaft.Restart()).spawn(Sleeper)
    async with rt.scope() as scope:
        inner = await rt.info(await scope.spawn(Failing))
        assert shown(scope).title == "Scope with 1 actor"
        read = shown(rt)
        assert read.title == repr(rt).strip("<>")
        assert read.rows[0] == ["name", "state", "process", "node"]
        infos = [await rt.info(echo), await rt.info(followed)]
        assert [row[:2] for row in read.rows[1:]] == [*([one.name, "alive"] for one in infos), [inner.name, "alive"]]
        assert {row[3] for row in read.rows[1:]} == {infos[0].node}
    await rt.kill(echo)
    await rt.stop(followed)
    assert shown(rt).rows == []


class Noted(aiodaft.Actor):
    @aiodaft.method
    async def add(self, x: int, y: int = 1) -> int:
        """Add two numbers.

        They are whole.
        """
        return x + y

    @aiodaft.method
    def bare(self) -> None: ...


async def test_a_handle_shows_its_actor_and_its_methods(rt: aiodaft.Runtime) -> None:
    noted = await rt.spawn(Noted)
    info = await rt.info(noted)
    read = shown(noted)
    assert read.title == "Noted"
    methods = {"method": "", "add(x: 'int', y: 'int' = 1) -> 'int'": "Add two numbers.", "bare() -> 'None'": ""}
    assert read.facts == {"name": info.name, "state": "alive", "process": info.process, **methods}
    await rt.kill(noted)
    assert shown(noted).facts["state"] == "dead"


async def test_a_group_shows_its_members_with_their_places_on_the_axes(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Echo, axes={"dp": 2, "tp": 2})
    read = shown(group)
    assert (read.title, read.facts) == ("Group of 4 Echo", {"id": group.id, "epoch": "1"})
    head, *members = [row for row in read.rows if len(row) > 2]
    assert head == ["rank", "dp", "tp", "name", "state", "process"]
    assert [member[:3] for member in members] == [["0", "0", "0"], ["1", "0", "1"], ["2", "1", "0"], ["3", "1", "1"]]
    await rt.kill(group[2])
    assert [row[4] for row in shown(group).rows if len(row) > 2] == ["state", "alive", "alive", "dead", "alive"]
    assert [row[0] for row in shown(group[1:3]).rows if len(row) > 2] == ["rank", "0", "1"]


async def test_a_ref_shows_what_it_is_and_where_and_fetches_nothing(rt: aiodaft.Runtime) -> None:
    worker = await rt.spawn(Source)
    info = await rt.info(worker)
    pending = worker.make(1 << 20)
    assert shown(pending).facts["state"] in {"pending", "done"}
    await pending.ready()
    before = rt.traffic().payload_received
    large = {
        "call": f"Source.make of {info.name}",
        "state": "done",
        "value": "uint8[1048576]",
        "size": "1 MiB",
        "where": f"{info.name} in {info.process}",
    }
    assert shown(pending).facts == large
    assert rt.traffic().payload_received == before
    await pending
    assert shown(pending).facts == large | {"where": f"{large['where']}, this process"}
    put = rt.put(np.zeros((4, 8), np.float32))
    await put.ready()
    assert shown(put).facts == {
        "call": "put", "state": "done", "value": "float32[4, 8]", "size": "128 B", "where": "this process",
    }  # fmt: skip


async def test_refs_of_small_values_and_of_failures_show_what_is_known(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    ref = failing.raise_value_error(FORGED)
    await ref.ready()
    read = shown(ref)
    assert read.facts["state"] == f"failed: ValueError: {FORGED}"
    assert "where" not in read.facts
    group = await rt.group(2, Echo)
    refs = group.all(Echo.echo, "text")
    assert await refs == ["text"] * 2
    read = shown(refs)
    assert read.title == "Refs: 2 of 2 done"
    assert [row[2:] for row in read.rows[1:]] == [["done", "str", "", "this process"]] * 2
    assert ref.exception() is not None


async def test_an_error_shows_its_cause_first_and_what_is_known_of_it(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    under_way = sleeper.sleep(60)
    await sleeper.history()
    os.kill((await rt.info(sleeper)).pid, signal.SIGKILL)
    died = await ended(under_way)
    assert isinstance(died, aiodaft.ActorDied)
    read = shown(died)
    assert read.items[0] == (1, f"ActorDied: {died}")
    assert (2, f"actor: {died.actor}") in read.items
    assert (2, "signal: SIGKILL") in read.items
    assert (2, "last_method: Sleeper.sleep") in read.items
    cause = ValueError(FORGED)
    cause.add_note("raised by Model.step in Model-1")
    later = aiodaft.exceptions.RestartLimitReached("it died too often")
    later.attempts = (died, ExceptionGroup("members failed", [KeyError("key"), died]))
    later.__cause__ = cause
    items = shown(later).items
    assert items[:2] == [(1, f"ValueError: {FORGED}"), (2, "raised by Model.step in Model-1")]
    assert items[2] == (1, "RestartLimitReached: it died too often")
    assert (2, f"ActorDied: {died}") in items
    assert (2, "ExceptionGroup: members failed (2 sub-exceptions)") in items
    assert (3, "KeyError: 'key'") in items


async def ended(ref: aiodaft.Ref[Any]) -> BaseException | None:
    await ref.ready()
    return ref.exception()


async def test_an_overview_shows_nodes_actors_processes_and_failures(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ValueError, match="in a row"):
        await failing.raise_value_error("in a row")
    info = await rt.info(failing)
    overview = await rt.overview()
    read = shown(overview)
    assert read.title == f"Runtime {overview.runtime}"
    assert [row[:2] for row in read.rows if row[0] in {info.node, info.name}][:2] == [
        [info.node, "ready"],
        [info.name, "Failing"],
    ]
    assert any("ValueError: in a row" in text and f"of {info.name}" in text for _, text in read.items)
