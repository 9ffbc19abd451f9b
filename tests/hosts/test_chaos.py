"""Chaos on three hosts, whose connections to each other are reset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import torment
from chaos.stage import Hosts
from host_clusters import HostCluster, cluster_on, use_all
from network_namespaces import network
from seeds import of_the_day

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900), pytest.mark.asyncio(loop_factories=["uvloop"])]


@pytest.fixture
def cluster(nothing_left_behind: None, tmp_path: Path) -> Iterator[HostCluster]:
    with network("one", "two", "three") as net, cluster_on(net, tmp_path / "key") as made:
        yield made


async def test_a_little_chaos_on_three_hosts(cluster: HostCluster, tmp_path: Path) -> None:
    await use_all(cluster)
    report = await torment(23, 0, tmp_path, Hosts(cluster), rounds_per_runtime=2)
    assert report.violations == []
    assert report.faults["trouble"] == 1


@pytest.mark.soak
async def test_ten_minutes_of_chaos_on_three_hosts(cluster: HostCluster, tmp_path: Path) -> None:
    await use_all(cluster)
    report = await torment(of_the_day(1, 1 << 30)[0], 600, tmp_path, Hosts(cluster))
    assert report.violations == [], report
