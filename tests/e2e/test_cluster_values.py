"""Values between the nodes of a cluster: over streams that authenticated processes open, and nothing else listens."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Cluster, attached, cluster_of, start_fork_servers
from device_actors import DeviceKeeper
from inside import peer_of
from relay_actors import Sink, Source, digest, made
from transports import needs_ucx

import aiodaft
from aiodaft_transport import Unreachable
from aiodaft_transport.ucx import INTERFACE_VARIABLE

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
SIZES = [100_000, 3 * MIB, 40 * MIB]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster") / "key", "n1", "n2", "n3") as made:
        start_fork_servers(made)
        yield made


rt = attached


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_goes_from_node_to_node_and_to_the_controller(rt: aiodaft.Runtime, size: int) -> None:
    source, sink = await rt.on(node="n1").spawn(Source), await rt.on(node="n2").spawn(Sink)
    ref = source.make(size)
    assert await sink.take(ref) == digest(made(size))
    assert digest(await ref) == digest(made(size))
    assert rt.traffic().payload_received == (await ref).nbytes
    assert "tcp" in peer_of(rt).store.transports


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_of_the_controller_goes_to_every_node(rt: aiodaft.Runtime, size: int) -> None:
    ref = rt.put(made(size))
    sinks = [await rt.on(node=name).spawn(Sink) for name in ("n1", "n2")]
    assert await asyncio.gather(*(sink.take(ref) for sink in sinks)) == [digest(made(size))] * 2


async def test_a_transport_that_does_not_lead_to_a_node_is_an_error_that_says_so(rt: aiodaft.Runtime) -> None:
    sink = await rt.on(node="n2").spawn(Sink)
    with pytest.raises(Unreachable, match="transport 'shm' does not lead to another machine"):
        await sink.take(rt.put(made(MIB), transport="shm"))
    assert await sink.take(rt.put(made(MIB), transport="tcp")) == digest(made(MIB))


@pytest.mark.parametrize("transport", [None, "tcp"])
async def test_a_runtime_chooses_how_its_actors_send(cluster: Cluster, transport: str | None) -> None:
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, transport=transport) as rt:
        source, sink = await rt.on(node="n2").spawn(Source), await rt.on(node="n2").spawn(Sink)
        assert await sink.take(source.make(MIB)) == digest(made(MIB))
        assert await source.transports() == {transport or "shm"}


@pytest.mark.parametrize("mib", [1, pytest.param(40, marks=pytest.mark.soak)])
async def test_a_value_on_a_device_goes_to_another_node_through_memory_of_the_host(
    rt: aiodaft.Runtime, mib: int
) -> None:
    maker, near, far = [await rt.on(node=name).spawn(DeviceKeeper, 0) for name in ("n1", "n1", "n2")]
    size = mib * MIB // 4
    ref = maker.make_slowly(size, 2.0)
    sums = [keeper.where(ref) for keeper in (near, far)]
    await maker.open_gate()
    # Tensors of these devices are tensors of the host for torch: they arrive in its memory.
    assert await asyncio.gather(*sums) == [(0, 2.0 * size), (None, 2.0 * size)]
    assert await far.add_in_place(ref, 1.0) == 3.0
    assert (await maker.traffic())["device"] == size * 4
    host, base, part, strided, *empty = await far.echo(maker.several(1000))
    assert [float(tensor.sum()) for tensor in (host, base, part, strided)] == [3000, 1000, 10, 1000]
    assert [tensor.numel() for tensor in empty] == [0, 0]
    del ref
    while await maker.blocks():
        pass


async def stored(rt: aiodaft.Runtime, actors: list[Sink]) -> list[int]:
    return [(await rt.info(actor)).stored_bytes for actor in actors]


async def test_the_network_of_each_node_carries_a_value_once_and_its_processes_share_one_block(
    rt: aiodaft.Runtime,
) -> None:
    size = 8 * MIB
    source = await rt.on(node="n1").spawn(Source)
    near = [await rt.on(node="n1").spawn(Sink) for _ in range(2)]
    far = [[await rt.on(node=name).spawn(Sink) for _ in range(3)] for name in ("n2", "n3")]
    everywhere = [*near, *far[0], *far[1]]
    ref = source.make(size)
    assert await asyncio.gather(*(sink.take(ref) for sink in everywhere)) == [digest(made(size))] * 8
    # Two blocks in its own shared memory, and once to each other node.
    assert await source.sent() == 4 * size
    for sinks in far:
        assert sum(nbytes > size for nbytes in await stored(rt, sinks)) == 1
        assert sum([await sink.sent() for sink in sinks]) == 2 * size
        # The process that it came to over the network reads the same block.
        held = [await sink.hold(ref) for sink in sinks]
        assert [content for content, _, _ in held] == [digest(made(size))] * 3
        assert [await sink.landing_blocks() for sink in sinks] == [0, 0, 0]
        assert sum([await sink.live_blocks() for sink in sinks]) == 1
    # A process that comes later finds the block.
    late = await rt.on(node="n2").spawn(Sink)
    assert await late.spoil(ref) == digest(made(size))
    assert await late.take(ref) == digest(made(size))
    assert await source.sent() == 4 * size
    assert await stored(rt, near) == [0, 0]
    del ref
    gc.collect()
    async with asyncio.timeout(30):
        while any(await stored(rt, [*everywhere, late])):
            await asyncio.sleep(0)


async def test_a_node_whose_copy_is_gone_gets_another_one(rt: aiodaft.Runtime) -> None:
    size = 8 * MIB
    source = await rt.on(node="n1").spawn(Source)
    first, second, third = [await rt.on(node="n2").spawn(Sink) for _ in range(3)]
    ref = source.make(size)
    assert await first.take(ref) == await second.take(ref) == digest(made(size))
    assert await source.sent() == size
    await rt.kill(first)
    assert await asyncio.gather(second.take(ref), third.take(ref)) == [digest(made(size))] * 2
    assert await source.sent() == 2 * size


@pytest.fixture
def over_ucx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    with cluster_of(tmp_path / "key", "n1", "n2") as made:
        yield made


@needs_ucx
async def test_nodes_that_name_an_interface_use_ucx_between_them(over_ucx: Cluster) -> None:
    async with aiodaft.Runtime(over_ucx.address, key_file=over_ucx.key_file) as rt:
        source, sink = await rt.on(node="n1").spawn(Source), await rt.on(node="n2").spawn(Sink)
        size = 8 * MIB
        # Both processes have said what leads to them.
        assert await sink.take(source.make(0)) == digest(made(0))
        ref = source.make(size)
        assert await sink.take(ref) == digest(made(size))
        assert digest(await ref) == digest(made(size))
        assert "tcp" not in await source.transports()
        # Of one block, which ucx has not allocated.
        assert await source.live_blocks() == 1
        del ref


@pytest.mark.parametrize(("interface", "why"), [("all", "one named interface"), ("nix9", "cannot use 'nix9'")])
def test_a_node_whose_interface_cannot_be_used_does_not_start(
    interface: str, why: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, interface)
    joined = subprocess.run(
        [sys.executable, "-m", "aiodaft.cli", "join", cluster.address, "--name", "n9"],
        env=cluster.environment, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (joined.returncode, joined.stdout) == (1, "")
    assert why in joined.stderr


@pytest.mark.parametrize(("interface", "error"), [("all", ValueError), ("nix9", Unreachable)])
async def test_a_runtime_whose_interface_cannot_be_used_does_not_open(
    interface: str, error: type[Exception], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, interface)
    with pytest.raises(error, match="interface"):
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file):
            pass
