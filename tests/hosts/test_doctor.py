"""`aiodaft doctor ADDRESS` on hosts with a node each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from host_clusters import HostCluster, cluster_on
from network_namespaces import Host, network

from aiodaft_transport.ucx import INTERFACE_VARIABLE

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    with network("one", "two") as net, cluster_on(net, tmp_path_factory.mktemp("cluster") / "key") as made:
        yield made


def doctor(cluster: HostCluster, host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    address = cluster.address_of(cluster.net.hosts[0])
    argv = [sys.executable, "-m", "aiodaft.cli", "doctor", address, *arguments, "--key-file", str(cluster.key_file)]
    return host.run(argv, check=False, timeout=50, env={**os.environ, INTERFACE_VARIABLE: ""})


def rows_of(printed: str) -> list[list[str]]:
    """The cells of the table."""
    _, _, table = printed.partition("from ")
    return [line.split() for line in table.splitlines()[1:] if not line[0].isdigit()]


def test_it_measures_the_way_between_all_hosts(cluster: HostCluster) -> None:
    ended = doctor(cluster, cluster.net.hosts[1])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = rows_of(ended.stdout)
    assert sorted(row[:3] for row in rows) == [
        ["(here)", "one", "eth0"], ["(here)", "two", "eth0"], ["one", "two", "eth0"], ["two", "one", "eth0"],
    ]  # fmt: skip
    for _, _, _, latency, unit, speed, per_second, ucx in rows:
        assert float(latency) > 0
        assert unit == "ms"
        assert int(speed.replace(",", "")) > 0
        assert (per_second, ucx) == ("MB/s", "-")


def test_a_node_that_others_do_not_reach_is_told_apart_from_those_that_work(cluster: HostCluster) -> None:
    one, two = cluster.net.hosts
    options = ["--listen", "tcp://127.0.0.1:0", "--name", "deaf", "--key-file", str(cluster.key_file)]
    joining = [sys.executable, "-m", "aiodaft.cli", "join", cluster.address_of(one), *options]
    node = two.popen(joining, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    address = node.stdout.readline().strip()
    ended = doctor(cluster, one, "deaf", "one")
    assert ended.returncode == 1
    assert f"1. node deaf at {address}: " in ended.stdout
    assert "Connection refused; 127.0.0.1 leads to the machine itself only" in ended.stdout
    assert [row[:2] for row in rows_of(ended.stdout)] == [["(here)", "one"]]


def test_a_transport_that_only_one_side_has_is_a_finding(cluster: HostCluster) -> None:
    one = cluster.net.hosts[0]
    argv = [sys.executable, "-m", "aiodaft.cli", "doctor", cluster.address_of(one), "one"]
    environment = {**os.environ, INTERFACE_VARIABLE: "eth0", "AIODAFT_KEY_FILE": str(cluster.key_file)}
    ended = one.run(argv, check=False, env=environment)
    assert ended.returncode == 1
    ((*_, tcp, unit, fails, number),) = rows_of(ended.stdout)
    assert (unit, fails, number) == ("MB/s", "fails", "(1)"), tcp
    assert "1. (here) to one, ucx: " in ended.stdout
