"""Nodes in the bundles of a placement group, in a real Ray of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import lone_launcher
import pytest
from leaks import is_alive, wait_ended

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("ray") is None, reason="there is no package ray"),
]
# Counts Ray's resources on this machine, and makes a group of its own; then waits.
PROGRAM = """
import asyncio, os, sys
import ray
import aiodaft, aiodaft.launch
from travellers import Traveller

async def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        async with aiodaft.launch.ray([{"CPU": 2}, {"CPU": 2}], patience=2):
            pass
    except aiodaft.exceptions.LaunchFailed as error:
        print(error)
    try:
        async with aiodaft.launch.ray([{"CPU": 1}], node_options=["--label", "broken"]):
            pass
    except aiodaft.exceptions.LaunchFailed as error:
        print("ended with status" in str(error))
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}], "PACK")
    async with aiodaft.launch.ray(group) as address, aiodaft.Runtime(address) as rt:
        first, second = await rt.on(node="ray-0").spawn(Traveller), await rt.on(node="ray-1").spawn(Traveller)
        assert await second.ask(first, 1) == 2
        print([dict(member.totals)["cpus"] for member in rt._controller.nodes.members()])
        print(await first.pid(), await second.pid(), flush=True)
        if sys.argv[1:] == ["wait"]:
            await asyncio.Event().wait()
    assert ray.cluster_resources()["CPU"] == 3
    print([bundle["CPU"] for bundle in group.bundle_specs])

aiodaft.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    key = str(tmp_path / "key")
    assert subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", key], capture_output=True).returncode == 0
    support = str(Path(lone_launcher.__file__).parent)
    return {**os.environ, "AIODAFT_KEY_FILE": key, "PYTHONPATH": support, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def test_the_program_of_the_page_runs(tmp_path: Path, environment: Mapping[str, str]) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], env=environment, stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1")


def test_nodes_have_what_their_bundles_have_and_failures_say_why(environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, timeout=100
    )
    no_room, broken, totals, pids, left = done.stdout.splitlines()
    assert done.returncode == 0
    assert no_room == "not all bundles had room, and nodes that came up, within 2 s"
    assert (broken, totals, left) == ("True", "[1.0, 2.0]", "[1.0, 2.0]")
    assert not any(is_alive(int(pid)) for pid in pids.split())


def test_nodes_end_with_a_program_that_is_killed(environment: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "wait"], env=environment, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [program.stdout.readline() for _ in range(4)][-1].split()
        program.send_signal(signal.SIGKILL)
        wait_ended(*map(int, pids))
