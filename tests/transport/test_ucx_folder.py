"""Nothing that UCX makes has a name in shared memory for longer than its maker lives."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from actors import Lingering
from conformance import fetched, granted
from ends import open_pair
from transports import needs_ucx

import aiodaft
from aiodaft_transport import TransportError
from aiodaft_transport.system import SHARED_MEMORY, folder, sweep_folders
from aiodaft_transport.ucx.transport import UcxSettings, UcxTransport

_MAKER = """
import sys
from aiodaft_transport.system import folder
with folder() as path:
    open(path + "/file", "w").close()
    print(path, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_there_as_long_as_it_is_needed() -> None:
    with folder() as name:
        path = Path(name)
        (path / "file").touch()
        with folder() as other:
            assert other != name
        sweep_folders()
        assert (path / "file").exists()
    assert not path.exists()


def test_what_a_killed_process_leaves_the_next_one_removes() -> None:
    with subprocess.Popen([sys.executable, "-c", _MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        path = Path(maker.stdout.readline().decode().strip())
        sweep_folders()
        assert (path / "file").exists()
        maker.kill()
        maker.wait()
        sweep_folders()
        assert not path.exists()


def test_a_link_that_another_user_may_have_made_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    link = Path(f"{SHARED_MEMORY}/aiodaft-{os.urandom(8).hex()}")
    link.symlink_to(tmp_path)
    try:
        sweep_folders()
        assert (tmp_path / "file").exists()
    finally:
        link.unlink()


def test_a_folder_that_cannot_be_locked_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir(SHARED_MEMORY))

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="locks"), folder():
        pass
    assert not {name for name in set(os.listdir(SHARED_MEMORY)) - before if name.startswith("aiodaft-")}


async def test_what_a_killed_actor_leaves_its_nursery_removes(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(restart="temporary").spawn(Lingering)
    name = await actor.make_folder()
    os.kill(await actor.pid(), signal.SIGKILL)
    while name in os.listdir(SHARED_MEMORY):
        await asyncio.sleep(0)


@needs_ucx
async def test_ucx_makes_its_files_there(tmp_path: Path) -> None:
    @contextmanager
    def nowhere(nbytes: int) -> Generator[str]:
        yield str(tmp_path / "nowhere")

    async with open_pair("ucx", settings=UcxSettings(folder=nowhere)) as pair:
        with pytest.raises(TransportError):
            await fetched(pair, (await granted(pair, 100))[1])


@needs_ucx
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_a_process_without_room_in_shared_memory_says_so_and_goes_on_when_it_has_some(side: str) -> None:
    room = 1 << 30

    def bounded(nbytes: int) -> AbstractContextManager[str]:
        return folder(nbytes, room=lambda: room)

    async with open_pair("ucx", settings=UcxSettings(folder=bounded)) as pair:
        if side == "consumer":
            # The producer has its files already.
            assert isinstance(pair.producer.transport, UcxTransport)
            assert pair.producer.transport.driver
        room = 1000
        with pytest.raises(OSError, match=r"UCX needs [\d,]+ bytes in /dev/shm, and 1,000 are free there"):
            await fetched(pair, (await granted(pair, 100_000))[1])
        await pair.settle()
        room = 1 << 30
        _, grant, content = await granted(pair, 100_000)
        assert await fetched(pair, grant) == content
