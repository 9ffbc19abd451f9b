"""Nodes that are drained: their actors go elsewhere, and no call is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from clusters import Cluster, RunningNode, cluster_of
from drained import Clerk, Colleague
from travellers import Traveller

import aiodaft
from aiodaft import Restart
from aiodaft.exceptions import OutcomeUnknown

# Of nodes to which the clerks may move.
WORKER = ("--label", "for=clerks")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(tmp_path / "key", "n1", "n2") as made:
        yield made


@pytest.fixture
async def rt(cluster: Cluster) -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as made:
        yield made


class Notes:
    """A file of notes, and a gate."""

    def __init__(self, tmp_path: Path) -> None:
        self.file, self.gate = tmp_path / "notes", tmp_path / "gate"
        self.file.touch()
        os.mkfifo(self.gate)

    async def has(self, *lines: str) -> None:
        while self.file.read_text().splitlines() != list(lines):
            await asyncio.sleep(0.01)

    async def open_gate(self) -> None:
        await asyncio.to_thread(self.gate.write_text, "")


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


class Drain:
    """`aiodaft drain`, under way."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        self._process = subprocess.Popen(
            cluster.command("drain", *arguments), env=cluster.environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._lines = self._process.stdout

    async def says(self) -> str:
        return (await asyncio.to_thread(self._lines.readline)).rstrip("\n")

    async def ended(self) -> tuple[int, str, str]:
        """The exit status, and the rest of the output."""
        said, complained = await asyncio.to_thread(self._process.communicate, timeout=30)
        return self._process.returncode, said, complained


async def exit_status(node: RunningNode) -> int:
    return await asyncio.to_thread(node.process.wait, 30)


async def test_a_drained_node_takes_nothing_new_and_ends_with_its_last_actor(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
    drain = Drain(cluster, "n2", "--grace", "60")
    assert (await drain.says()).startswith(f"waits for Traveller-2 (pid {await second.pid()}, of controller-")
    with pytest.raises(
        aiodaft.exceptions.InsufficientResources, match=r"cannot be placed: node 'n2' is being drained$"
    ):
        await rt.on(node="n2").spawn(Traveller)
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="is being drained"):
        await rt.on(apart_from=first).spawn(Traveller)
    assert (await rt.info(await rt.spawn(Traveller))).node == "n1"
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="is being drained"):
        await rt.on(with_=second).spawn(Traveller)
    shown = await asyncio.to_thread(cluster.run, "ps")
    assert "    is being drained" in shown.stdout.splitlines()
    assert {node.name: node.state for node in await rt.nodes(patience=30)} == {"n1": "ready", "n2": "draining"}
    # Calls that need no new place go on.
    assert await second.ask(first, 1) == 2
    await rt.stop(second)
    status, said, complained = await drain.ended()
    assert (status, said.splitlines()[-1], complained) == (0, "node n2 is drained", "")
    assert await exit_status(cluster.nodes[1]) == 0
    assert await first.increment(1) == 2


async def test_what_outstays_the_grace_ends_with_an_error_that_names_the_drain(
    rt: aiodaft.Runtime, cluster: Cluster, notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    actor = await rt.on(node="n2").spawn(Traveller)
    # It may only be there.
    bound = await rt.on(node="n2", restart=Restart(intensity=1, period=600)).spawn(Clerk, str(notes.file))
    waits = bound.serve(0, [], str(notes.gate))
    await notes.has("serves 0")
    drain = Drain(cluster, "n2", "--grace", "0")
    with pytest.raises(aiodaft.ActorDied, match="node 'n2' was drained, and the grace was over"):
        await waits
    status, said, _ = await drain.ended()
    assert (status, said.splitlines()[-1]) == (0, "node n2 is drained")
    with pytest.raises(OutcomeUnknown, match="drained"):
        await actor.increment(1)
    with pytest.raises(aiodaft.exceptions.RestartLimitReached):
        await bound.echo(1)
    assert "Clerk-1 stays on a node that is being drained: Clerk-1 cannot be placed: node 'n2'" in caplog.text
    assert await exit_status(cluster.nodes[1]) == 0


async def test_an_unknown_node_is_an_error_that_names_those_that_are_there(cluster: Cluster) -> None:
    assert await Drain(cluster, "n3").ended() == (
        1, "", "aiodaft: there is no node 'n3' in this cluster; there is n1, n2\n",
    )  # fmt: skip


class Moving:
    """A supervised actor on n3, which is being drained; the other node for it is n4."""

    def __init__(self, cluster: Cluster, actor: Clerk) -> None:
        self._cluster = cluster
        self.actor = actor

    async def drain(self, *options: str) -> Drain:
        """Returns when the actor is stopped, or waits for its calls under way."""
        await asyncio.to_thread(self._cluster.add, "n4", *WORKER)
        return Drain(self._cluster, "n3", *options)


@pytest.fixture
async def moving(cluster: Cluster, rt: aiodaft.Runtime, notes: Notes) -> Moving:
    await asyncio.to_thread(cluster.add, "n3", *WORKER)
    spawner = rt.on(labels={"for": "clerks"}, wait=20)
    return Moving(cluster, await spawner.spawn(Clerk, str(notes.file)))


async def left(rt: aiodaft.Runtime, actor: Clerk) -> None:
    """Wait until an actor takes no calls where it was."""
    while (await rt.info(actor)).alive:
        await asyncio.sleep(0.01)
    # Its process answers this when it has begun to stop the actor.
    await rt.stack()


@pytest.mark.parametrize("method", ["serve", "work"])
async def test_a_call_under_way_ends_and_those_behind_it_are_made_on_another_node_in_order(
    rt: aiodaft.Runtime, moving: Moving, notes: Notes, method: str
) -> None:
    actor, extra = moving.actor, [1]
    call = getattr(actor, method)
    under_way = call(0, [], str(notes.gate))
    await notes.has("serves 0")
    calls = [call(number, extra) for number in range(1, 4)]
    extra.append(2)
    drain = await moving.drain("--grace", "60")
    assert "waits for Clerk-1" in await drain.says()
    await left(rt, actor)
    calls += [call(number, extra) for number in range(4, 6)]
    await notes.open_gate()
    assert await under_way == (0, 0, [])
    assert await asyncio.gather(*calls) == [(1, number, [1] if number < 4 else [1, 2]) for number in range(1, 6)]
    await notes.has(*(f"serves {number}" for number in range(6)))
    assert (await drain.ended())[0] == 0
    info = await rt.info(actor)
    assert (info.node, info.epoch, info.restarts, info.last_error) == ("n4", 1, 1, None)


async def test_tells_streams_and_the_calls_of_other_processes_are_made_again_too(
    rt: aiodaft.Runtime, moving: Moving, notes: Notes
) -> None:
    actor, extra = moving.actor, [1]
    other = await rt.on(node="n1").spawn(Colleague, actor)
    under_way = actor.work(0, [], str(notes.gate))
    await notes.has("serves 0")
    actor.work.tell(1, extra)
    asked, counted = other.work(2, [3]), actor.count(3, extra)
    extra.append(2)
    await other.waits(1)
    drain = await moving.drain("--grace", "60")
    await left(rt, actor)
    await notes.open_gate()
    assert await under_way == (0, 0, [])
    assert await asked == (1, 2, [3])
    assert [item async for item in counted] == [(1, item, [1]) for item in range(3)]
    assert sorted(notes.file.read_text().splitlines()) == ["counts to 3", *(f"serves {number}" for number in range(3))]
    assert (await drain.ended())[0] == 0


async def test_the_end_of_the_grace_cancels_the_call_under_way_and_no_other(
    rt: aiodaft.Runtime, moving: Moving, notes: Notes
) -> None:
    under_way = moving.actor.serve(0, [], "never")
    await notes.has("serves 0")
    behind = moving.actor.serve(1, [])
    drain = await moving.drain("--grace", "3")
    with pytest.raises((aiodaft.ActorDied, aiodaft.CallCancelled)) as caught:
        await under_way
    assert caught.value.executed is None
    assert await behind == (1, 1, [])
    assert (await drain.ended())[0] == 0


async def test_a_value_that_was_not_fetched_yet_is_waited_for(rt: aiodaft.Runtime, moving: Moving) -> None:
    size = 8 << 20
    ref = moving.actor.make(size)
    await ref.ready()
    drain = await moving.drain("--grace", "60")
    while await moving.actor.now() == 0:
        await asyncio.sleep(0)
    while not (await drain.says()).startswith("waits for the process of Clerk-1"):
        pass
    assert len(await ref) == size
    del ref
    assert await drain.ended() == (0, "node n3 is drained\n", "")


async def test_actors_that_share_a_process_move_together(rt: aiodaft.Runtime, moving: Moving) -> None:
    guest = await rt.on(with_=moving.actor).spawn(Clerk)
    drain = await moving.drain("--grace", "60")
    assert (await drain.ended())[0] == 0
    assert [await actor.now() for actor in (moving.actor, guest)] == [1, 1]
    assert await guest.pid() == await moving.actor.pid()
    assert (await rt.info(guest)).node == "n4"


async def test_actors_whose_calls_under_way_call_each_other_move(
    rt: aiodaft.Runtime, moving: Moving, notes: Notes
) -> None:
    first, second = moving.actor, await rt.on(labels={"for": "clerks"}).spawn(Clerk, str(notes.file))
    gates = [str(notes.gate), f"{notes.gate}-2"]
    os.mkfifo(gates[1])
    calls = [first.visit(second, gates[0]), second.visit(first, gates[1])]
    await notes.has("visits", "visits")
    drain = await moving.drain("--grace", "60")
    while all([(await rt.info(actor)).alive for actor in (first, second)]):
        await asyncio.sleep(0.01)
    await asyncio.gather(*(asyncio.to_thread(Path(gate).write_text, "") for gate in gates))
    assert [await call for call in calls] in ([0, 1], [1, 0], [1, 1])
    assert (await drain.ended())[0] == 0


async def test_an_actor_that_is_stopped_while_it_moves_is_gone_for_good(
    rt: aiodaft.Runtime, cluster: Cluster, moving: Moving, notes: Notes
) -> None:
    under_way = moving.actor.serve(0, [], str(notes.gate))
    await notes.has("serves 0")
    drain = await moving.drain("--grace", "60")
    await left(rt, moving.actor)
    stopping = asyncio.ensure_future(rt.stop(moving.actor))  # noqa: TID251 - the test waits for it
    await notes.open_gate()
    await under_way
    await stopping
    assert (await drain.ended())[0] == 0
    with pytest.raises(aiodaft.ActorDied):
        await moving.actor.now()
    # The place that was found for it is free.
    shown = await asyncio.to_thread(cluster.run, "ps")
    assert "Clerk" not in shown.stdout


async def test_sigterm_drains_if_that_is_asked_for_and_a_second_one_ends_at_once(cluster: Cluster) -> None:
    third = cluster.add("n3", "--drain", "60")
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
        actor = await rt.on(node="n3").spawn(Traveller)
        third.process.send_signal(signal.SIGTERM)
        while True:
            try:
                await rt.stop(await rt.on(node="n3").spawn(Traveller))
            except aiodaft.exceptions.InsufficientResources:
                break
        assert await actor.increment(1) == 2
        third.process.send_signal(signal.SIGTERM)
        assert await exit_status(third) == 0
