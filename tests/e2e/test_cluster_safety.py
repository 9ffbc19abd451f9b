"""The traces of a cluster for other users and machines: one port per node, and nothing of the key."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from clusters import Cluster, cluster_of, start_fork_servers
from leaks import descendants, open_files
from plain_actors import Box, Pickled, Point, Worker

import aiodaft
from aiodaft._protocol.connections.address import parse_address
from aiodaft._runtime.connections.identity import load_identity
from aiodaft.cli.key import new_key
from aiodaft.exceptions import NotAuthenticated, SerializationError
from aiodaft_transport.handshake import CHALLENGE_SIZE, HELLO_SIZE, MAGIC

pytestmark = pytest.mark.timeout(120)

# The state of a TCP socket that listens: see proc(5).
TCP_LISTEN = "0A"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster") / "key", "n1", "n2") as made:
        start_fork_servers(made, codec="msgpack")
        yield made


def attached(cluster: Cluster) -> aiodaft.Runtime:
    return aiodaft.Runtime(cluster.address, key_file=cluster.key_file, codec="msgpack")


def ports_of(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    sockets = set(open_files(pid).values())
    found = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        found += [
            int(row[1].rpartition(":")[2], 16)
            for row in rows
            if row[3] == TCP_LISTEN and f"socket:[{row[9]}]" in sockets
        ]
    return found


def command_line_and_environment(pid: int) -> list[bytes]:
    """The view of a process in `ps`."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]


def address_of(cluster: Cluster) -> tuple[str, int]:
    return tuple(parse_address(cluster.address))


async def test_f81_each_node_has_one_port_and_no_other_process_listens(cluster: Cluster) -> None:
    async with attached(cluster) as rt:
        first, second = await rt.on(node="n1").spawn(Worker), await rt.on(node="n2").spawn(Worker)
        assert len(await first.ask(second, bytes(1 << 20))) == 1 << 20
        for node in cluster.nodes:
            assert ports_of(node.process.pid) == [parse_address(node.address).port]
            workers = descendants(node.process.pid)
            assert len(workers) >= 2
            assert [ports_of(pid) for pid in workers] == [[] for _ in workers]
        assert ports_of(os.getpid()) == []


async def test_f93_no_process_of_a_cluster_shows_the_key(cluster: Cluster) -> None:
    identity = load_identity(cluster.key_file)
    secret = identity.key.secret()
    private = next(line for line in cluster.key_file.read_bytes().splitlines()[-2:] if not line.startswith(b"-"))
    async with attached(cluster) as rt:
        first, second = await rt.on(node="n1").spawn(Worker), await rt.on(node="n2").spawn(Worker)
        await first.ask(second, 1)
        shown = [repr(rt).encode(), str(await rt.stack()).encode(), repr(await rt.info(first)).encode()]
        for node in cluster.nodes:
            for pid in {node.process.pid, *descendants(node.process.pid)}:
                shown += command_line_and_environment(pid)
                # No file with it stays open, also none without a name.
                assert [target for target in open_files(pid).values() if "identity" in target] == []
    spellings = [secret, secret.hex().encode(), base64.b64encode(secret), private]
    assert [text for text in shown for one in spellings if one in text] == []


async def test_f83_a_runtime_with_another_key_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key") as other, pytest.raises(NotAuthenticated, match="belongs to another cluster"):
        async with aiodaft.Runtime(cluster.address, key_file=other.key_file, codec="msgpack"):
            pass


async def test_f85_and_f86_strangers_at_the_port_of_a_node_stop_nothing(cluster: Cluster) -> None:
    async with attached(cluster) as rt:
        worker = await rt.on(node="n1").spawn(Worker)
        strangers = [socket.create_connection(address_of(cluster), timeout=10) for _ in range(200)]
        try:
            for index, sock in enumerate(strangers):
                said = (b"", MAGIC, MAGIC.ljust(HELLO_SIZE, b"\xff"), random.Random(index).randbytes(2000))[index % 4]
                if said:
                    try:
                        sock.sendall(said)
                    except ConnectionError:
                        continue
            # Actors answer, and others get in.
            assert await worker.same(1) == 1
            async with asyncio.timeout(20):
                other = await rt.on(node="n2").spawn(Worker)
                assert await other.ask(worker, Point(1, 2)) == Point(1, 2)
        finally:
            for sock in strangers:
                sock.close()
        with socket.create_connection(address_of(cluster), timeout=10) as sock:
            assert len(sock.recv(2 * CHALLENGE_SIZE)) == CHALLENGE_SIZE


async def test_values_go_between_nodes_that_encrypt_them(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    assert CliRunner().invoke(new_key, [str(key_file), "--encrypt-payloads"]).exit_code == 0
    with ExitStack() as stack:
        made = Cluster(key_file, stack)
        for name in ("n1", "n2"):
            made.add(name)
        async with aiodaft.Runtime(made.address, key_file=key_file) as rt:
            first, second = await rt.on(node="n1").spawn(Worker), await rt.on(node="n2").spawn(Worker)
            value = os.urandom(8 << 20)
            assert await first.ask(second, value) == value
            assert await asyncio.gather(*(second.same(first.same(value)) for _ in range(4))) == [value] * 4
            threads = {thread.name for thread in threading.enumerate()}
            assert "aiodaft encrypts" in threads
    while any(thread.name == "aiodaft encrypts" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)


async def test_f87_a_runtime_that_refuses_pickle_works_in_a_cluster(cluster: Cluster) -> None:
    async with attached(cluster) as rt:
        first, second = await rt.on(node="n1").spawn(Worker), await rt.on(node="n2").spawn(Worker)
        value = [Box("a", (Point(0, 1),)), list(range(30_000)), "x" * 100_000]
        assert await first.ask(second, value) == value
        assert await second.same(first.same(value)) == value
        with pytest.raises(SerializationError, match="refuses pickle"):
            await first.same(Pickled())
        with pytest.raises(SerializationError, match="result of Worker.pickled cannot travel"):
            await second.pickled()
