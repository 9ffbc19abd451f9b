"""UCX listens to peers only, uses its given devices, and gives the reason if it cannot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conformance import LoopbackControl, fetched, granted
from ends import LocalHost, open_pair
from far_end import open_far_end
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import in_shared_memory, is_alive, left_in_shared_memory, open_files
from transports import needs_ucx

from aiodaft_transport import GrantError, TransportError, Unreachable, check_name, open_transport
from aiodaft_transport.ucx import INTERFACE_VARIABLE, ucp
from aiodaft_transport.ucx.transport import options_for
from aiodaft_transport.ucx.ucp import LIBRARY_VARIABLE, load

pytestmark = needs_ucx

MIB = 1 << 20


def listening() -> set[str]:
    """Local addresses that this process listens at, in the kernel's hexadecimal."""
    inodes = {target[8:-1] for target in open_files().values() if target.startswith("socket:[")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes}


async def run_python(code: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_on_one_host_nothing_listens_and_no_file_is_left_in_the_open() -> None:
    shared = in_shared_memory()
    async with open_pair("ucx") as pair:
        _, grant, _ = await granted(pair, 100)
        await fetched(pair, grant)
        assert listening() == set()
        assert left_in_shared_memory(shared) == set()


async def test_a_named_interface_is_the_only_one_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    monkeypatch.setenv("UCX_TLS", "all")
    async with open_pair("ucx") as pair:
        _, grant, content = await granted(pair, 100)
        assert await fetched(pair, grant) == content
        assert listening() == {"0100007F"}


@pytest.mark.parametrize("interface", ["all", "*", "lo,eth0", ""])
def test_more_than_one_interface_is_refused(interface: str) -> None:
    with pytest.raises(ValueError, match="one named interface"):
        options_for(interface)


def test_an_interface_that_is_not_there_is_refused_with_those_there_are() -> None:
    with pytest.raises(Unreachable, match="cannot use 'nope0': the interfaces are .*lo"):
        options_for("nope0")


@pytest.mark.parametrize("path", ["/nowhere/libucp.so.0", "libc.so.6"])
def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, path)
    with pytest.raises(Unreachable, match=r"needs UCX 1\.21 or later.*pip install aiodaft\[ucx-cu13\]"):
        check_name("ucx")


def test_what_ucx_refuses_is_an_error() -> None:
    with pytest.raises(ucp.UcxError, match="UCX cannot be used here: No such device"):
        ucp.Worker(load(), {"TLS": "NO_SUCH_TRANSPORTS"})


async def test_nothing_loads_ucx_before_it_is_chosen_and_loading_it_takes_no_signal() -> None:
    output = await run_python(
        "import sys, os, signal, faulthandler\n"
        "import aiodaft, aiodaft_transport\n"
        "from pathlib import Path\n"
        "assert 'ucp' not in Path('/proc/self/maps').read_text()\n"
        "environment = dict(os.environ)\n"
        "def handled():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return [line for line in lines if line.startswith(('SigBlk', 'SigIgn', 'SigCgt'))]\n"
        "before = handled()\n"
        "aiodaft_transport.check_name('ucx')\n"
        "assert 'ucp' in Path('/proc/self/maps').read_text()\n"
        "assert environment == dict(os.environ)\n"
        "assert handled() == before\n"
        "print('fine')"
    )
    assert output == "fine\n"


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=40), st.integers(0, 5))
def test_a_garbled_note_is_a_transport_error_at_most(note: bytes, kind: int) -> None:
    transport = open_transport("ucx", LocalHost())
    for garbled in (note, bytes([kind]) + note):
        with suppress(TransportError):
            transport.note_received(LoopbackControl("consumer"), garbled, [])
    transport.close()


async def test_a_damaged_or_repeated_note_is_refused_before_ucx_sees_it() -> None:
    sent: list[bytes] = []
    async with open_pair("ucx") as pair:
        control = LoopbackControl("consumer")
        control.send_note = lambda transport, note, fds=(): sent.append(note)  # type: ignore[method-assign]
        pair.producer.transport.grant(pair.producer.transport.allocate(10), control)
        assert len(sent) == 2
        damaged = [note[:-1] + bytes([note[-1] ^ 1]) for note in sent]
        for note in [*damaged, *(note[:-1] for note in sent)]:
            with pytest.raises(GrantError, match="damaged"):
                pair.consumer.transport.note_received(pair.consumer.control, note, [])
        with pytest.raises(GrantError, match="invalid note"):
            pair.consumer.transport.note_received(LoopbackControl("another"), sent[1], [])
        for note in sent:
            pair.consumer.transport.note_received(pair.consumer.control, note, [])
        for note in sent:
            with pytest.raises(GrantError, match=r"invalid note|twice"):
                pair.consumer.transport.note_received(pair.consumer.control, note, [])
        await pair.settle()


async def test_a_grant_beyond_its_segment_is_refused() -> None:
    async with open_pair("ucx") as pair:
        block, grant, content = await granted(pair, 1000)
        for offset, nbytes in ((1 << 40, 1000), (-8, 1000), (0, 1 << 40), (0, 0)):
            with pytest.raises(GrantError, match="unknown segment"):
                await fetched(pair, (grant[0], offset, nbytes, grant[3]))
        assert await fetched(pair, grant) == content
        block.release()


async def test_a_process_that_is_killed_leaves_nothing_in_shared_memory() -> None:
    shared = in_shared_memory()
    async with open_far_end("ucx") as far:
        await far.fetch(await far.ask("produce", "one", MIB, 1))
        await far.kill()
        assert not is_alive(far.pid)
        assert left_in_shared_memory(shared) == set()


async def test_a_peer_that_died_after_its_note_is_no_liar() -> None:
    async with open_far_end("ucx") as far:
        notes: list[bytes] = []
        far.connection.on_note = lambda note, fds: notes.append(note)
        grant = await far.ask("produce", "one", 100, 1)
        far.process.kill()
        await far.connection.lost.wait()
        far.process.wait()
        for note in notes:
            far.transport.note_received(far.connection, note, ())
        with pytest.raises(TransportError, match="Destination is unreachable"):
            await far.fetch(grant)
