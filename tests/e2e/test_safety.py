"""The traces of a runtime's processes for other users of the machine."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from actors import Echo
from inside import peer_of
from leaks import descendants, open_files

import aiodaft
from aiodaft._runtime.process import Env
from aiodaft_transport import Key

# The state of a TCP socket, and the flag of a unix socket, that listens: see proc(5).
TCP_LISTEN, UNIX_LISTEN = "0A", 1 << 16


def listening_inodes() -> set[str]:
    """Inode numbers of all sockets on this machine that listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        found |= {row[9] for row in rows if row[3] == TCP_LISTEN}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found | {row[6] for row in rows if int(row[3], 16) & UNIX_LISTEN}


def command_line_and_environment(pid: int) -> list[bytes]:
    """The view of a process in `ps`."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_f81_no_process_of_a_runtime_listens(transport: str) -> None:
    async with aiodaft.Runtime(preload=(), transport=transport) as rt, rt.spawn(Echo) as a, rt.spawn(Echo) as b:
        assert len(await b.echo(a.echo(bytes(1 << 20)))) == 1 << 20
        # The fork server and two actors.
        processes = [os.getpid(), *descendants()]
        assert len(processes) == 4
        sockets = {target for pid in processes for target in open_files(pid).values() if target.startswith("socket:[")}
        assert sockets
        assert {f"socket:[{inode}]" for inode in listening_inodes()} & sockets == set()


async def test_f93_no_process_shows_the_key() -> None:
    key = bytes(range(65, 97))
    spellings = [key, key.hex().encode(), base64.b64encode(key)[:-4]]
    env = Env(token=lambda nbytes: key if nbytes == len(key) else os.urandom(nbytes))
    async with aiodaft.Runtime(preload=(), env=env) as rt, rt.spawn(Echo) as a:
        assert await a.echo(1) == 1
        assert peer_of(rt).process.key.mac(b"test") == Key(key).mac(b"test")
        shown = [repr(rt).encode(), str(await rt.stack()).encode(), repr(await rt.info(a)).encode()]
        for pid in [os.getpid(), *descendants()]:
            shown += command_line_and_environment(pid)
        assert [text for text in shown for one in spellings if one in text] == []
