"""A program that speaks an older wire version is served as it was when its session was recorded.

If a test here fails, the wire has changed, or the messages of the runtime's processes over it: programs and nodes of
another release of this series would fail in the same way. `tests/support/record_session.py` records sessions.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from record_session import Color, Pair, Point

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import FrameDecoder
from aiodaft._protocol.connections.messages import OLDEST_WIRE_VERSION, WIRE_VERSION, Message
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Env, ProcessOptions, closed, opened
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.errors import decode_failure
from aiodaft.exceptions import DaftError
from aiodaft_transport import Key, default_name

# The beginning of pickles.
_PICKLED = pickle.PROTO + b"\5"


class Recording(NamedTuple):
    """A session: its two processes, and their bytes, the program's if they are marked by `>`."""

    program: PeerId
    worker: PeerId
    written: list[tuple[str, bytes]]


@pytest.fixture(params=range(OLDEST_WIRE_VERSION, WIRE_VERSION + 1), ids=lambda version: f"version {version}")
def recording(request: pytest.FixtureRequest) -> Recording:
    file = Path(__file__).parent.parent / "protocol" / f"session_{request.param}.txt"
    names, *lines = file.read_text().splitlines()
    program, worker = map(PeerId, names.split())
    return Recording(program, worker, [(line[0], bytes.fromhex(line[2:])) for line in lines])


@pytest.fixture
async def program(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[socket.socket]:
    """The end of the program of a connection to a worker of today."""
    # The actor sets it.
    monkeypatch.setattr(sys, "tracebacklimit", 0, raising=False)
    program, worker, _ = recording
    options = ProcessOptions(worker, "node", program, program, program, program, default_name(), True, 2.0, 1_000_000)
    peer = Peer(options, Key(bytes(32)), Env())
    peer.caller.current_maker = current_call.get

    async def explain(connection: object, reason: Exception) -> DaftError:
        return DaftError(str(reason))

    peer.connections.explain = explain
    opened(peer.process, peer.stay_behind)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    peer.connections.attach(program, theirs)
    with ours:
        yield ours
        closed(peer.process)
        await peer.aclose("the test is over")
    for thread in threading.enumerate():
        # The thread of the actor ends by itself.
        if thread.name.startswith("Recorded"):
            thread.join(5)


def comparable(message: Message) -> Any:
    """A message without the parts that differ from run to run, or between Pythons: pids, the lines of tracebacks,
    pickles.
    """
    if message[0] == m.HELLO:
        return message[:4]
    if message[0] == m.RESULT and _PICKLED in message[2]:
        return message[:2], repr(decode(m.read_result(message)[1][0]))
    if message[0] == m.ERROR and message[2]:
        number, encoded, executed = m.read_error(message)
        error = decode_failure(encoded, executed)
        return number, type(error), error.args, executed
    return message


async def test_a_worker_answers_a_recorded_program_as_it_did(recording: Recording, program: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    then, now = FrameDecoder(), FrameDecoder()
    expected: list[Message] = []
    answered: list[Message] = []
    for mark, data in recording.written:
        if mark == ">":
            await loop.sock_sendall(program, data)
            continue
        expected += then.feed(data)
        while len(answered) < len(expected):
            came = await loop.sock_recv(program, 1 << 16)
            assert came, "the worker refuses the recorded bytes"
            answered += now.feed(came)
    # Answers to different calls may overtake each other.
    assert sorted(map(comparable, answered), key=repr) == sorted(map(comparable, expected), key=repr)


def test_a_program_understands_a_recorded_worker(recording: Recording) -> None:
    session: Session[None] = Session(recording.program, 1, remote=recording.worker, max_pending=10)
    came = [message for mark, data in recording.written if mark == "<" for message in session.receive_data(data)]
    results = [decode(m.read_result(message)[1][0]) for message in came if message[0] == m.RESULT]
    (kept, numbers, error), _ = results.pop()
    assert (kept, numbers, type(error), error.args) == (frozenset({Color.RED}), range(3), ValueError, ("said",))
    assert results == [
        ((None, True, 1 << 80, -1.5, "\u00e9", b"\0\xff", [1, {"a": (2,)}], {3}), {"key": []}),
        ((Point(0.5, ("a", "b")), Pair(Color.RED, Point(1, ()))), {"pair": Pair(1, None)}),
    ]
    assert [message[2] for message in came if message[0] == m.REPLY][:4] == [None, 16, 22, 64]
    assert [decode(m.read_item(message)[1][0]) for message in came if message[0] == m.ITEM] == [0, 1, 2]
    (failed, cancelled) = [m.read_error(message) for message in came if message[0] == m.ERROR]
    assert type(decode_failure(*failed[1:])) is LookupError
    assert cancelled == m.read_error(m.cancelled(cancelled[0]))
