"""The check of every test sees what the framework leaves, and nothing that other programs do meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from leaks import Snapshot, in_shared_memory, left_in_shared_memory

import aiodaft

SHARED_MEMORY = Path("/dev/shm")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sockets(shared_runtime: aiodaft.Runtime) -> AsyncIterator[list[socket.socket]]:
    """Sockets of a module's runtime, such as those over which it answers `aiodaft ps`."""
    sockets: list[socket.socket] = []
    yield sockets
    for one in sockets:
        one.close()


@pytest.fixture
def name() -> Iterator[str]:
    """A name that nothing has, and has not afterwards."""
    name = uuid4().hex
    yield name
    for path in SHARED_MEMORY.glob(f"*{name}"):
        path.unlink()


def test_a_file_that_another_program_leaves_in_shared_memory_is_no_leak(name: str) -> None:
    before = Snapshot.take()
    subprocess.run(["touch", SHARED_MEMORY / name], check=True)
    assert Snapshot.take().new_since(before) == {}


@pytest.mark.parametrize("prefix", ["aiodaft-", "ucx_shm_posix_"])
def test_a_file_with_a_name_of_ours_is_a_leak(name: str, prefix: str) -> None:
    before = in_shared_memory()
    (SHARED_MEMORY / f"{prefix}{name}").touch()
    assert left_in_shared_memory(before, looks=1) == {f"{prefix}{name}"}


def test_what_another_program_uses_is_no_leak(name: str) -> None:
    before = in_shared_memory()
    code = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"
    # Its parent is no process of this test.
    other = subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-c", code, SHARED_MEMORY / f"aiodaft-{name}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    other.stdout.readline()
    assert left_in_shared_memory(before, looks=1) == set()
    (SHARED_MEMORY / f"aiodaft-{name}").unlink()
    other.communicate()


@pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])
async def test_what_a_runtime_opens_that_goes_on_is_no_leak_of_a_test_beside_it(sockets: list[socket.socket]) -> None:
    sockets.append(socket.socket())
