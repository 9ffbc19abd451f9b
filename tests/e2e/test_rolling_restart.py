"""Nodes that are drained, ended and started again one by one, while two controllers call supervised actors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import rolling_load
from clusters import Cluster, RunningNode, cluster_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]


@contextmanager
def load(cluster: Cluster, at: RunningNode, notes: Path) -> Generator[subprocess.Popen[str]]:
    """A controller that is attached to a node, and calls."""
    with subprocess.Popen(
        [sys.executable, rolling_load.__file__, at.name, str(notes)],
        env={**cluster.environment, "AIODAFT_ADDRESS": at.address},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_complete(cluster: Cluster) -> None:
    """Wait until all nodes are members: those that were there join again when the coordinator is."""
    while True:
        shown = cluster.run("ps", timeout=90).stdout.splitlines()
        if {line.split()[0] for line in shown} >= {node.name for node in cluster.nodes}:
            return


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.mark.parametrize("state", ["file", "nodes"])
def test_a_rolling_restart_of_all_nodes_under_load_loses_no_call(tmp_path: Path, state: str) -> None:
    notes = tmp_path / "notes"
    options = ("--state", str(tmp_path / "state.db")) if state == "file" else ()
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(tmp_path / "key", "n1", "n2", "n3", options=options))
        loads = [stack.enter_context(load(cluster, cluster.nodes[place], notes)) for place in (0, 1)]
        for name in ("n2", "n1", "n3"):
            node = next(node for node in cluster.nodes if node.name == name)
            drained = cluster.run("drain", name, "--grace", "60", timeout=90)
            assert drained.returncode == 0, drained.stderr
            assert node.process.wait(20) == 0
            cluster.start_again(node, *((options or ("--recover",)) if name == "n1" else ()))
            wait_complete(cluster)
        results = [result_of(process) for process in loads]
    made = [what for result in results for what in result["made"]]
    assert [result["lost"] for result in results] == [{}, {}]
    assert Counter(notes.read_text().splitlines()) == Counter(made)
    # Each actor had to leave at least once.
    assert all(result["moves"] >= rolling_load.ACTORS for result in results)
