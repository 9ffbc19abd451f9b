"""The first node is replaced by one on another host, which has its name from then on: as a pod of Kubernetes is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import far_actors
import pytest
from host_clusters import PORT
from network_namespaces import Host, Network, network

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]

# Has an /etc/hosts of its own.
WITH_NAMES = ("unshare", "--mount", "--", "sh", "-ec", 'mount --bind "$0" /etc/hosts; exec "$@"')


class Named:
    """Nodes that find the first one by a name."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.key_file = str(folder / "key")
        self.net = net
        self._names = folder / "hosts"
        made = subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", self.key_file], capture_output=True)
        assert made.returncode == 0, made.stderr

    def give_name(self, host: Host) -> None:
        """From now on, it is "first"."""
        # In place: the file is mounted.
        self._names.write_text(f"{host.address} first\n")

    def start(self, host: Host, name: str, *command: str) -> None:
        """Start a node, and wait until it is a member."""
        listen = f"tcp://{host.address}:{PORT}"
        options = ["--listen", listen, "--name", name, "--key-file", self.key_file, "--cpus", "4"]
        argv = [*WITH_NAMES, str(self._names), sys.executable, "-m", "aiodaft.cli", *command, *options]
        support = str(Path(far_actors.__file__).parent)
        node = host.popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": support})
        assert node.stdout is not None
        assert node.stdout.readline().strip() == listen


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Named]:
    with network("one", "two", "three") as net:
        yield Named(net, tmp_path)


PROGRAM = """
import asyncio, sys
import aiodaft
from far_actors import Far

async def main() -> None:
    async with aiodaft.Runtime(unhandled="log") as rt:
        actor = await rt.on(node="two").spawn(Far)
        await rt.name(actor, "kept")
        print(await actor.tell(1), flush=True)
        # The first node is replaced.
        sys.stdin.readline()
        while "new" not in [member.name for member in rt._controller.nodes.members()]:
            await asyncio.sleep(0.05)
        print(await actor.tell(2))
        # The nodes tell the new one the names of their actors.
        while await rt.names() != ("kept",):
            await asyncio.sleep(0.05)
        other = await rt.on(node="new").spawn(Far)
        print(await other.relay(await rt.lookup("kept", Far), 3), await actor.heard())

aiodaft.run(main())
"""


def test_nodes_and_programs_find_the_first_node_at_its_new_address(nodes: Named) -> None:
    one, two, three = nodes.net.hosts
    nodes.give_name(one)
    nodes.start(one, "old", "up")
    nodes.start(two, "two", "join", f"tcp://first:{PORT}")
    environment = {
        **os.environ, "AIODAFT_ADDRESS": f"tcp://{two.address}:{PORT}", "AIODAFT_KEY_FILE": nodes.key_file,
        "PYTHONPATH": str(Path(far_actors.__file__).parent),
    }  # fmt: skip
    program = two.popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "1\n"
    one.end_processes()
    # Its address answers nothing any more.
    nodes.net.unplug(one)
    nodes.give_name(three)
    nodes.start(three, "new", "up", "--recover")
    printed, _ = program.communicate("go on\n", timeout=60)
    assert (program.returncode, printed) == (0, "2\n3 [1, 2, 3]\n")
