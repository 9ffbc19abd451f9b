"""Several nodes, each a process of its own with a port of its own, here on one machine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import lone_controller
import pytest
from click.shell_completion import BashComplete
from clusters import Cluster, RunningNode, attached, cluster_of, two_nodes
from etcd_cluster import BINARY, EtcdCluster
from inside import break_connection
from leaks import ended
from log_ear import listening
from printers import Printer
from seated import Seated
from terminals import Terminal
from traced import TraceFile
from travellers import Traveller

import aiodaft
from aiodaft.cli.__main__ import main

# Short, for tests in which one ends.
LEASE = ("--lease", "2")

pytestmark = pytest.mark.timeout(120)


cluster = two_nodes
rt = attached


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(name: str, cluster: Cluster) -> RunningNode:
    return next(node for node in cluster.nodes if node.name == name)


@contextmanager
def lone_controller_of(cluster: Cluster) -> Generator[list[int]]:
    """A controller, and its actors on both nodes: their pids."""
    program = [sys.executable, lone_controller.__file__]
    with subprocess.Popen(program, env=cluster.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield list(map(int, process.stdout.readline().split()))


async def test_what_actors_on_other_machines_print_and_log_comes_to_the_program(
    rt: aiodaft.Runtime, terminal: Terminal
) -> None:
    with listening("users.module") as ear:
        printer = await rt.on(node="n2").spawn(Printer)
        info = await rt.info(printer)
        await printer.say("printed")
        await printer.log(logging.INFO)
        await terminal.shows(out=f"({info.name} pid={info.pid}) printed\n")
        record = await ear.hears_record("level 20")
        assert (record.__dict__["actor"], record.process) == (info.name, info.pid)
        await printer.say("last words")
        await rt.stop(printer)
        terminal.look()
        assert terminal.out.endswith("last words\n")
        # An actor that outlives the program writes to the terminal of its node.
        keeper = await rt.on(name="printer", lifetime="cluster").spawn(Printer)
        await keeper.log(logging.ERROR)
        await rt.stop(keeper)
        assert len(ear.lines) == 1


async def test_a_program_uses_actors_on_all_nodes_and_they_each_other(rt: aiodaft.Runtime) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    assert await second.increment(first.increment(second.increment(0))) == 3
    assert (await first.ask(second, 3), await second.ask(first, 4)) == (4, 5)
    assert sorted([(await rt.info(first)).pid, (await rt.info(second)).pid]) == sorted([
        await first.pid(), await second.pid(),
    ])  # fmt: skip


async def test_a_trace_has_the_programs_actors_on_all_nodes_and_no_others(
    rt: aiodaft.Runtime, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodaft.tracing.clock_id", lambda: "the clock of another machine")
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    names = [(await rt.info(actor)).name for actor in (first, second)]
    path, other = tmp_path / "run.json", aiodaft.Runtime(cluster.address, key_file=cluster.key_file)
    async with other, other.spawn(Traveller), rt.trace(path) as trace:
        assert await second.ask(first, 4) == 5
    file = TraceFile(path)
    assert sorted(file.processes.values()) == sorted(["controller", *names])
    assert sorted(file.of("call")) == sorted([f"{names[1]}: Traveller.ask", f"{names[0]}: Traveller.increment"])
    assert trace.left_out == {}


async def test_an_overview_shows_all_nodes_and_what_goes_between_them(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2", name="second").spawn(Traveller)
    assert await second.ask(first, 4) == 5
    infos = [await rt.info(actor) for actor in (first, second)]
    overview = await rt.overview()
    assert [(node.name, node.state) for node in overview.nodes] == [("n1", "ready"), ("n2", "ready")]
    assert [(process.role, process.node) for process in overview.processes if process.role != "worker"] == [
        ("controller", infos[0].node), ("node", "n1"), ("node", "n2"),
    ]  # fmt: skip
    actors = {actor.name: actor for actor in overview.actors if actor.name in {info.name for info in infos}}
    assert [(actors[info.name].pid, actors[info.name].node) for info in infos] == [(one.pid, one.node) for one in infos]
    assert actors[infos[1].name].names == ("second",)
    (between,) = [flow for flow in overview.flows if (flow.source, flow.target) == (infos[1].process, infos[0].process)]
    assert between.calls == 1

    stopped = node_of("n2", cluster).process
    stopped.send_signal(signal.SIGSTOP)
    try:
        overview = await rt.overview(patience=0.5)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert [node.state for node in overview.nodes] == ["ready", "silent"]
    assert [(process.role, process.node) for process in overview.silent] == [("node", "n2")]
    # Its processes answer all the same.
    assert {info.name for info in infos} <= {actor.name for actor in overview.actors if actor.state == "idle"}


async def test_graphs_streams_channels_and_groups_reach_over_nodes(rt: aiodaft.Runtime) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    async with aiodaft.compile(lambda x: second.increment(first.increment(second.increment(x)))) as graph:
        assert await asyncio.gather(*map(graph, range(20))) == [x + 3 for x in range(20)]
    assert [item async for item in second.count(300)] == list(range(300))
    channel: aiodaft.Channel[int] = aiodaft.Channel(8)
    sending, receiving = first.send_all(channel, 100), second.receive_all(channel, 100)
    assert (await sending, await receiving) == (None, list(range(100)))
    group = await rt.on(spread=True).group(2, Traveller)
    assert {(await rt.info(member)).node for member in group} == {"n1", "n2"}
    assert await group.all(Traveller.increment, 1) == [2, 2]


async def test_a_member_is_told_of_a_change_again_if_its_connection_breaks_meanwhile(rt: aiodaft.Runtime) -> None:
    group = await rt.on(node="n2").group(1, Seated)
    # Both ends live, and the process of the member hears nothing of the change at first.
    break_connection(rt, (await rt.info(group[0])).process)
    await group.renew()
    assert (await group[0].look()).epoch == group.epoch == 2


async def test_runs_of_a_graph_work_again_after_a_connection_broke(rt: aiodaft.Runtime) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    async with aiodaft.compile(lambda x: second.increment(first.increment(x))) as graph:
        assert await graph(1) == 3
        break_connection(rt, (await rt.info(second)).process)
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await graph(1)
        assert await graph(1) == 3


async def test_large_values_go_between_nodes_and_to_and_from_the_controller(rt: aiodaft.Runtime) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    made, whole = second.make(1 << 20), bytes(range(256)) * 4096
    assert await first.keep(made) == 1 << 20
    # The same value over both ways.
    assert await (await rt.on(node="n2").spawn(Traveller)).keep(made) == 1 << 20
    assert await made == whole
    put = rt.put(whole)
    assert await asyncio.gather(first.keep(put), second.keep(put), first.keep(whole)) == [1 << 20] * 3


async def test_a_node_that_is_not_there_is_named_with_those_that_are(rt: aiodaft.Runtime) -> None:
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="there is no node 'n7'; there is n1 and n2"):
        await rt.on(node="n7").spawn(Traveller)


async def test_the_death_of_an_actor_on_another_node_is_told_with_its_signal(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(node="n2").spawn(Traveller)
    os.kill(await actor.pid(), signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match="was killed by SIGKILL"):
        await actor.increment(1)


async def test_the_patience_of_a_runtime_reaches_the_workers_of_nodes(cluster: Cluster) -> None:
    patience = aiodaft.Patience(None, 0.5)
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, patience=patience) as hasty:
        actor = await hasty.on(node="n2").spawn(Traveller)
        os.kill(await actor.pid(), signal.SIGSTOP)
        with pytest.raises(aiodaft.exceptions.PeerLost, match=r"lost_after=0\.5"):
            await actor.increment(1)


async def test_a_supervised_actor_is_made_again_on_its_node(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(node="n2", restart="permanent").spawn(Traveller)
    before = await actor.pid()
    os.kill(before, signal.SIGKILL)
    await ended(before)
    while True:
        try:
            assert await actor.pid() != before
            break
        except aiodaft.ActorDied:
            await asyncio.sleep(0.01)
    assert (await rt.info(actor)).restarts == 1


async def test_controllers_share_named_actors(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    named = await rt.on(node="n1").spawn(Traveller)
    await rt.name(named, "shared")
    async with aiodaft.Runtime(cluster.nodes[1].address, key_file=cluster.key_file) as other:
        found = await other.lookup("shared", Traveller)
        mine = await other.on(node="n2").spawn(Traveller)
        assert await mine.increment(found.increment(0)) == 2
        assert await mine.ask(found, 1) == 2
    # The other controller's actors are gone, and this one's are not.
    assert await named.increment(1) == 2


async def test_the_actors_of_a_controller_that_is_killed_end_and_their_names_are_free(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    with lone_controller_of(cluster) as (controller, *workers):
        actor = await rt.lookup("traveller", Traveller)
        assert await actor.increment(1) == 2
        os.kill(controller, signal.SIGKILL)
        await ended(*workers)
    with pytest.raises(aiodaft.ActorDied, match="its owner is gone"):
        await actor.increment(1)
    with pytest.raises(aiodaft.NameNotFound):
        await rt.lookup("traveller", Traveller)


async def test_another_key_opens_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("key", "new", str(tmp_path / "other"))
    with pytest.raises(aiodaft.exceptions.NotAuthenticated):
        async with aiodaft.Runtime(cluster.address, key_file=tmp_path / "other"):
            pass


def test_ps_shows_the_nodes_and_their_resources(cluster: Cluster) -> None:
    shown = cluster.run("ps").stdout.splitlines()
    assert [line.split("  ")[:3] for line in shown] == [
        ["n1", cluster.nodes[0].address, "free: 8/8 cpus"],
        ["n2", cluster.nodes[1].address, "free: 8/8 cpus"],
    ]


async def test_ps_has_a_document_with_the_actors_on_each_node(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    actor = await rt.on(node="n2").spawn(Traveller)
    await rt.name(actor, "shown")
    document = json.loads((await asyncio.to_thread(cluster.run, "ps", "--json")).stdout)
    first, second = document["nodes"]
    assert [(node["name"], node["state"], node["processes"] == []) for node in (first, second)] == [
        ("n1", "ready", True), ("n2", "ready", False),
    ]  # fmt: skip
    (process,) = second["processes"]
    assert (process["pid"], process["actors"]) == (await actor.pid(), [(await rt.info(actor)).name])
    assert (process["names"], second["total"]["cpus"]) == (["shown"], 8)


async def test_a_shell_completes_the_names_of_a_cluster(
    rt: aiodaft.Runtime, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rt.name(await rt.on(node="n2").spawn(Traveller), "completed")
    monkeypatch.setenv("AIODAFT_ADDRESS", cluster.address)
    monkeypatch.setenv("AIODAFT_KEY_FILE", str(cluster.key_file))
    shell = BashComplete(main, {}, "aiodaft", "_AIODAFT_COMPLETE")

    def completed(command: str, begun: str) -> list[str]:
        return [item.value for item in shell.get_completions([command], begun)]

    assert await asyncio.to_thread(completed, "stop", "com") == ["completed"]
    assert await asyncio.to_thread(completed, "drain", "n") == ["n1", "n2"]
    monkeypatch.delenv("AIODAFT_ADDRESS")
    assert await asyncio.to_thread(completed, "drain", "n") == []


async def test_the_end_of_a_node_fails_what_was_on_it_and_nothing_else(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", options=LEASE) as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
            first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
            await rt.name(second, "second")
            worker = await second.pid()
            assert await second.ask(first, 1) == 2
            cluster.nodes[1].process.kill()
            await ended(worker)
            with pytest.raises(aiodaft.exceptions.OutcomeUnknown) as lost:
                await second.increment(1)
            assert "increment" in f"{lost.value}{lost.value.__notes__}"
            assert lost.value.actor.startswith("Traveller-")
            assert await first.increment(1) == 2
            # Its lease ends, and with that its names.
            while await rt.names():
                await asyncio.sleep(0.01)
            with pytest.raises(aiodaft.exceptions.InsufficientResources, match="there is no node 'n2'; there is n1$"):
                await rt.on(node="n2").spawn(Traveller)
            with pytest.raises(aiodaft.exceptions.OutcomeUnknown):
                await second.increment(1)
            # Another node may have the name.
            cluster.add("n2")
            again = await rt.on(node="n2", wait=20).spawn(Traveller)
            assert await first.ask(again, 1) == 2


async def test_a_supervised_actor_is_made_again_on_another_node(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", "n3", options=LEASE) as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as rt:
            anchor = await rt.on(node="n1").spawn(Traveller)
            actor = await rt.on(apart_from=anchor, restart=aiodaft.Restart(intensity=3)).spawn(Traveller)
            guest = await rt.on(with_=actor, restart=aiodaft.Restart(intensity=3)).spawn(Traveller)
            before = node_of((await rt.info(actor)).node, cluster)
            worker = await actor.pid()
            before.process.kill()
            await ended(worker)
            while True:
                try:
                    assert await guest.ask(actor, 1) == 2
                    break
                except aiodaft.exceptions.OutcomeUnknown:
                    await asyncio.sleep(0.01)
            assert {(await rt.info(one)).node for one in (actor, guest)} == {"n2", "n3"} - {before.name}


async def test_an_actor_that_nobody_calls_is_missed_when_its_node_is_gone(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", options=LEASE) as cluster:
        with pytest.raises(ExceptionGroup) as caught:
            async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as rt, rt.scope() as scope:
                await scope.on(node="n2").spawn(Traveller)
                cluster.nodes[1].process.kill()
                await asyncio.Event().wait()
        (error,) = caught.value.exceptions
        assert "the node 'n2' is not in the cluster any more" in str(error)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    if BINARY is None or importlib.util.find_spec("aetcd") is None:
        pytest.skip("there is no etcd here: apt-get install etcd-server; pip install 'aiodaft[etcd]'")
    members = EtcdCluster(tmp_path)
    members.start_all()
    yield members.state
    members.kill_all()


@pytest.mark.parametrize("how", ["file", "nodes", "etcd"])
async def test_a_coordinator_that_is_killed_stops_no_call_and_comes_back_with_its_names(
    tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    state: tuple[str, ...] = ("--state", str(tmp_path / "state.db")) if how == "file" else ()
    if how == "etcd":
        state = ("--state", request.getfixturevalue("etcd"))
    with cluster_of(tmp_path / "key", "n1", "n2", options=(*LEASE, *state)) as cluster:
        async with aiodaft.Runtime(cluster.nodes[1].address, key_file=cluster.key_file) as rt:
            here = rt.on(node="n2")
            first, second = await here.spawn(Traveller), await here.spawn(Traveller)
            await rt.name(second, "second")
            cluster.restart_first(*LEASE, *(state or ["--recover"]))
            # No connection between these was made before.
            assert await first.ask(second, 1) == 2
            while True:
                try:
                    found = await rt.lookup("second", Traveller)
                    break
                except (
                    aiodaft.exceptions.OutcomeUnknown,
                    aiodaft.NameNotFound,
                    aiodaft.exceptions.CoordinatorUnavailable,
                ):
                    await asyncio.sleep(0.01)
            assert await found.increment(1) == 2
            with pytest.raises(aiodaft.exceptions.NameTaken):
                await rt.name(first, "second")
            third = await rt.on(node="n1").spawn(Traveller)
            assert await third.ask(first, 1) == 2


async def test_programs_and_other_nodes_end_although_the_first_node_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodaft._runtime.node.nodes._PATIENCE", 0.1)
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        first, second = cluster.nodes
        try:
            async with aiodaft.Runtime(second.address, key_file=cluster.key_file, cancel_grace=0.1) as rt:
                await rt.on(node="n1").spawn(Traveller)
                stopped = await rt.on(node="n2").spawn(Traveller)
                first.process.send_signal(signal.SIGSTOP)
                await rt.stop(stopped)
            assert await asyncio.to_thread(second.end) == 0
        finally:
            first.process.send_signal(signal.SIGCONT)


async def test_a_node_that_cannot_start_workers_any_more_ends(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
            actor = await rt.on(node="n2").spawn(Traveller)
            os.kill(parent_of(await actor.pid()), signal.SIGKILL)
            assert await asyncio.to_thread(cluster.nodes[1].process.wait, 20) == 1
            assert await (await rt.on(node="n1").spawn(Traveller)).increment(1) == 2


@pytest.mark.parametrize("lease", ["0", "-5", "nan", "inf", "soon"])
def test_a_lease_that_no_node_can_keep_is_refused(cluster: Cluster, lease: str) -> None:
    refused = cluster.run("up", "--lease", lease)
    assert refused.returncode == 2
    assert "is not a number of seconds of at least 1" in refused.stderr


@pytest.mark.hosts
def test_down_says_which_node_was_not_told_to_end(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        first, second = cluster.nodes
        first.process.send_signal(signal.SIGSTOP)
        try:
            ended = cluster.run("down", second.address)
            assert (ended.returncode, "the node n1 was not told to end" in ended.stderr) == (1, True), ended.stderr
            assert second.process.wait(20) == 0
        finally:
            first.process.send_signal(signal.SIGCONT)


@pytest.mark.hosts
async def test_down_ends_a_node_that_has_lost_its_lease(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", "n3", options=("--lease", "1")) as cluster:
        _, second, third = cluster.nodes
        third.process.send_signal(signal.SIGSTOP)
        try:
            async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
                while len(await rt.nodes()) == 3:
                    await asyncio.sleep(0.05)
            down = asyncio.get_running_loop().create_task(asyncio.to_thread(cluster.run, "down"))
            # Now the third one is waited for.
            assert await asyncio.to_thread(second.process.wait, 30) == 0
        finally:
            third.process.send_signal(signal.SIGCONT)
        said = await down
        assert said.returncode == 0, said.stderr
        assert await asyncio.to_thread(third.process.wait, 30) == 0


def test_down_ends_all_nodes(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        ended = cluster.run("down", "--json")
        assert (ended.returncode, json.loads(ended.stdout), ended.stderr) == (0, {"ended": ["n1", "n2"]}, "")
        assert [node.process.wait(20) for node in cluster.nodes] == [0, 0]
        assert "no connection to" in cluster.run("ps").stderr
