"""The commands of the page on several machines are run as they stand, on two hosts that have the page's addresses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_namespaces import Host, network
from run_blocks import BLOCK

PAGE = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.timeout(120)


class Person:
    """Types commands on a host, in a home folder of its own."""

    def __init__(self, host: Host, address: str, home: Path) -> None:
        self.host = host
        self.home = home
        home.mkdir()
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {"HOME": str(home), "PATH": commands, "LANG": os.environ.get("LANG", "C")}
        host.run(["ip", "addr", "add", f"{address}/24", "dev", "eth0"])

    def type(self, commands: str) -> subprocess.Popen[str]:
        """Begin to run commands in a shell."""
        argv = ["bash", "-e", "-c", commands]
        return self.host.popen(argv, stdout=subprocess.PIPE, text=True, cwd=self.home, env=self._environment)

    def print_of(self, commands: str) -> str:
        """Its output until it ends."""
        process = self.type(commands)
        printed, _ = process.communicate(timeout=50)
        assert process.returncode == 0, printed
        return printed


@pytest.fixture
def people(tmp_path: Path) -> Iterator[tuple[Person, Person]]:
    with network("n1", "n2") as net:
        first, second = net.hosts
        yield Person(first, "10.0.0.1", tmp_path / "first"), Person(second, "10.0.0.2", tmp_path / "second")


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_page_works_as_it_stands(people: tuple[Person, Person]) -> None:
    first, second = people
    make_key, start, use, drain = (
        [line.removeprefix("$ ") for line in block.splitlines()] for block in CONSOLE.findall(PAGE)
    )
    first.print_of("\n".join(make_key))
    # "Copy it to the other machines."
    shutil.copytree(first.home / ".config", second.home / ".config")
    up, listens, join, joined = start
    nodes = [first.type(up)]
    assert line_of(nodes[0]) == listens
    nodes.append(second.type(join))
    address = line_of(nodes[1])
    # Any free port.
    assert address.rpartition(":")[0] == joined.rpartition(":")[0]
    program, *_ = BLOCK.findall(PAGE)
    (first.home / "program.py").write_text(program)
    export, run = (line.replace(joined, address) for line in use)
    assert first.print_of(f"{export}\n{run}") == "4.0\n"
    shown = first.print_of(f"{export}\naiodaft ps")
    assert [line.split()[:2] for line in shown.splitlines()] == [["n1", listens], ["n2", address]]
    assert first.print_of(f"{export}\n{drain[0]}") == f"{drain[-1]}\n"
    assert nodes[1].wait(timeout=50) == 0
    first.print_of(f"{export.replace(address, listens)}\naiodaft down")
    assert nodes[0].wait(timeout=50) == 0
