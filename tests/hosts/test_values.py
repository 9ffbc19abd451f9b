"""Values between hosts, and the part of them that their network carries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import broadcast_over_hosts
import pytest
from network_namespaces import Host, network

SIZE = 32 << 20


def bytes_received(host: Host) -> int:
    """The bytes that came over the network of a host so far."""
    lines = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
    counts = {name.strip(): int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return sum(count for name, count in counts.items() if name != "lo")


def node(host: Host, *arguments: str, key: Path) -> str:
    """Start the node of a host; returns where it listens."""
    command = [sys.executable, "-m", "aiodaft.cli", *arguments, "--name", host.name, "--cpus", "8"]
    place = ["--listen", f"tcp://{host.address}:0", "--key-file", str(key)]
    process = host.popen([*command, *place], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        return str(process.stdout.readline().strip())


@pytest.mark.hosts
@pytest.mark.timeout(180)
def test_the_network_of_each_host_carries_a_value_once(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", str(key)], check=True, capture_output=True)
    with network("one", "two", "three") as net:
        one, two, three = net.hosts
        address = node(one, "up", key=key)
        for host in (two, three):
            node(host, "join", address, key=key)
        script = Path(broadcast_over_hosts.__file__)
        paths = os.pathsep.join([str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        one.run(
            [sys.executable, str(script), address, str(key), str(SIZE), "one", "two", "three"],
            env={**os.environ, "PYTHONPATH": paths}, timeout=60,
        )  # fmt: skip
        assert SIZE < bytes_received(two) < 1.5 * SIZE
        assert SIZE < bytes_received(three) < 1.5 * SIZE
