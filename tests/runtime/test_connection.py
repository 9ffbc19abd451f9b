"""A connection reads everything that its peer sent, and notices every end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from leaks import open_files
from transport_probes import no_more_files

from aiodaft._protocol.connections.codec import FrameDecoder, FrameEncoder
from aiodaft._protocol.connections.messages import CALL, HELLO, KINDS, NOTE, WIRE_VERSION, Message
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._protocol.objects.value import Borrowing
from aiodaft._runtime.calls.call import PendingCall, TellState
from aiodaft._runtime.connections.connection import BURSTS, Connection
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.peer import Replies
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.tasks import Wakeup
from aiodaft._runtime.process import Env, Process, ProcessOptions
from aiodaft.exceptions import DaftError, PeerLost, RemoteProtocolError
from aiodaft_transport import Key

HERE, THERE = PeerId("here"), PeerId("there")
GREETING: Message = (HELLO, WIRE_VERSION, WIRE_VERSION, THERE, 1)


def frames(*messages: Message) -> bytes:
    """Messages as they go over a connection."""
    encoder = FrameEncoder()
    for message in messages:
        encoder.pack(message)
    return encoder.take()


class Owner:
    """A process with one connection."""

    def __init__(self) -> None:
        self.came: list[Message] = []
        self.lost = asyncio.Event()
        self.ring_poller = RingPoller(asyncio.get_running_loop())
        self.sockets = Sockets()

    def handle(self, connection: Connection, message: Message) -> None:
        self.came.append(message)


class Taker(Owner):
    """Takes so many descriptors with each message."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.outcomes: list[str] = []

    def handle(self, connection: Connection, message: Message) -> None:
        try:
            self.sockets.close_all(connection.take_fds(self._count))
        except OSError as error:
            self.outcomes.append(str(error.strerror))
        else:
            self.outcomes.append("came")


def taking(count: int) -> tuple[Taker, Connection]:
    owner = Taker(count)
    return owner, connection_of(owner)


class Told(TellState):
    """A call that remembers whether it may have run, as it is told when the connection is lost."""

    executed: bool | None = True

    def on_lost(self, error: DaftError) -> None:
        self.executed = error.executed


def connection_of(owner: Owner, *, max_pending: int = 1, window: int = 1, env: Env | None = None) -> Connection:
    session: Session[PendingCall] = Session(HERE, 2, remote=THERE, max_pending=max_pending, window=window)
    options = ProcessOptions(HERE, "node", HERE, HERE, HERE, HERE, "shm", False, 0, max_pending)
    return Connection(
        Process(options, Key(bytes(32)), env or Env()),
        session,
        THERE,
        owner.ring_poller,
        [owner.handle] * KINDS,
        on_lost=lambda connection, reason: owner.lost.set(),
        on_dropped=lambda connection, message: None,
    )


async def test_a_peer_that_ends_with_something_unread_is_heard_to_its_last_word() -> None:
    """Its socket has data, an error and an end at once, of which uvloop tells in one event."""
    owner = Owner()
    connection = connection_of(owner)
    ours, theirs = socket.socketpair()
    connection.attach(ours)
    # Longer than one read.
    notes: list[Message] = [(NOTE, "shm", bytes(10_000), index) for index in range(5)]
    theirs.sendall(frames(GREETING, *notes))
    theirs.close()
    await owner.lost.wait()
    assert owner.came == notes


class Woken(Owner):
    """Wakes a task that ends the program for each message."""

    def handle(self, connection: Connection, message: Message) -> None:
        wakeup = Wakeup(self.ring_poller.wakeups)
        wakeup.add_done_callback(lambda _: sys.exit())
        wakeup.wake()


def test_the_end_of_a_peer_is_noticed_if_its_last_word_ends_a_program_that_goes_on() -> None:
    ours, theirs = socket.socketpair()
    # With unread data, its end is an error.
    theirs.sendall(frames(GREETING, (NOTE, "shm", b"", 0)))
    owners: list[Owner] = []

    async def hear() -> None:
        owners.append(Woken())
        connection_of(owners[0]).attach(ours)
        theirs.close()
        await owners[0].lost.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with pytest.raises(SystemExit):
            runner.run(hear())
        runner.run(owners[0].lost.wait())


async def test_a_connection_to_a_peer_that_is_gone_already_is_lost_and_nothing_else() -> None:
    owner = Owner()
    connection = connection_of(owner)
    with open(os.devnull, "rb") as file:
        connection.send_fds((NOTE, "shm", b"", 1), (file.fileno(),))
    ours, theirs = socket.socketpair()
    theirs.close()
    connection.attach(ours)
    assert isinstance(connection.lost, PeerLost)
    assert owner.lost.is_set()


async def test_a_lost_connection_does_not_remember_what_was_being_handled_when_it_broke() -> None:
    owner = Owner()
    connection = connection_of(owner)
    ours, theirs = socket.socketpair()
    connection.attach(ours)
    theirs.close()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        connection.send((NOTE, "shm", b"", 0))
    assert isinstance(connection.lost, PeerLost)
    broken = connection.lost.__cause__
    assert isinstance(broken, BrokenPipeError)
    assert (broken.__traceback__, broken.__context__, connection.lost.__context__) == (None, None, None)


async def test_a_lost_connection_keeps_no_buffers() -> None:
    """Some are remembered, to explain later calls."""
    owner = Owner()
    tracemalloc.start()
    try:
        connection = connection_of(owner)
        before, _ = tracemalloc.get_traced_memory()
        connection.close(PeerLost("it ended"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The one for reading, and those of the decoder.
    assert before - after > 64_000


def count_received(theirs: socket.socket) -> int:
    """The number of messages that a peer has received and not read."""
    try:
        return len(FrameDecoder().feed(theirs.recv(1 << 10)))
    except BlockingIOError:
        return 0


async def test_after_many_bursts_all_messages_of_a_turn_are_written_together() -> None:
    now = 0.0
    connection = connection_of(Owner(), env=Env(monotonic=lambda: now))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def turn(*pauses: float) -> tuple[int, int]:
        """Send one message before each pause: how many are written at once, and how many in the end."""
        nonlocal now
        for pause in pauses:
            connection.send((NOTE, "shm", b"", 0))
            now += pause
        at_once = count_received(theirs)
        await asyncio.sleep(0)
        return at_once, count_received(theirs)

    async def have_bursts() -> None:
        for _ in range(BURSTS):
            assert await turn(0.0, 0.0, 0.0) == (1, 2)

    with theirs:
        connection.attach(ours)
        theirs.recv(1 << 10)
        # The ends of the bursts: a turn with one message, and one that takes long.
        for last in ([0.0], [0.0, 1.0]):
            await have_bursts()
            assert await turn(0.0, 0.0, 0.0) == (0, 3)
            assert await turn(*last) == (0, len(last))
            assert await turn(0.0) == (1, 0)
        connection.close(PeerLost("it is enough"))


class Answerer(Owner):
    """Sends three messages for each one, and counts how many of them were written by then."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.written: list[int] = []

    def handle(self, connection: Connection, message: Message) -> None:
        for _ in range(3):
            connection.send((NOTE, "shm", b"", 0))
        self.written.append(count_received(self.theirs))


async def test_the_first_message_for_the_last_that_came_is_written_at_once_and_the_others_together() -> None:
    owner = Answerer()
    connection = connection_of(owner)
    with owner.theirs:
        connection.attach(owner.ours)
        owner.theirs.recv(1 << 10)
        owner.theirs.sendall(frames(GREETING, *[(NOTE, "shm", b"", 0)] * 2))
        while len(owner.written) < 2:
            await asyncio.sleep(0)
        # The first write has the answers to the message before, too.
        assert owner.written == [0, 4]
        assert count_received(owner.theirs) == 2
        connection.close(PeerLost("it is enough"))


async def test_a_message_is_written_at_once_whatever_depends_on_it() -> None:
    connection = connection_of(Owner(), env=Env(monotonic=lambda: 0.0))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        connection.attach(ours)
        theirs.recv(1 << 10)
        for _ in range(BURSTS + 2):
            connection.send((NOTE, "shm", b"", 0))
            assert count_received(theirs) == 1
            for _ in range(2):
                connection.follow()
                connection.send((NOTE, "shm", b"", 0))
            assert count_received(theirs) == 0
            await asyncio.sleep(0)
            assert count_received(theirs) == 2
        connection.close(PeerLost("it is enough"))


async def test_calls_behind_one_that_is_withdrawn_are_written_in_the_same_turn() -> None:
    connection = connection_of(Owner(), max_pending=2, window=2)
    ours, theirs = socket.socketpair()
    with theirs:
        connection.attach(ours)
        prepared, behind = CallId(1), CallId(2)
        connection.submit(prepared, TellState("prepared"), None)
        connection.submit(behind, TellState("behind"), (CALL, behind, ActorId(9), "f", ()))
        await asyncio.sleep(0)
        theirs.recv(1 << 10)
        assert connection.withdraw(prepared)
        await asyncio.sleep(0)
        theirs.setblocking(False)
        assert FrameDecoder().feed(theirs.recv(1 << 10)) == [(CALL, behind, ActorId(9), "f", ())]
        connection.close(PeerLost("it is enough"))


async def test_of_the_calls_of_a_lost_connection_only_those_that_were_sent_may_have_run() -> None:
    connection = connection_of(Owner(), max_pending=4)
    ours, theirs = socket.socketpair()
    with theirs:
        connection.attach(ours)
        calls = {CallId(number): Told(f"call {number}") for number in range(1, 5)}
        for number, state in calls.items():
            connection.submit(number, state, None if number == 2 else (CALL, number, ActorId(9), "f", ()))
        connection.close(PeerLost("it broke"))
    objects: Any = SimpleNamespace(process=SimpleNamespace(tasks=None), borrowing=Borrowing(HERE))
    Replies(objects).connection_lost(connection, PeerLost("it broke"))
    assert [state.executed for state in calls.values()] == [None, False, False, False]
    assert not connection.session.calls


async def test_descriptors_that_there_is_no_room_for_are_missing_from_their_message_and_from_no_other() -> None:
    owner, connection = taking(1)
    ours, theirs = socket.socketpair()
    connection.attach(ours)
    theirs.sendall(frames(GREETING))
    with open(os.devnull, "rb") as file, theirs:
        for number, room in enumerate([1, 0, 1]):
            with no_more_files(room):
                socket.send_fds(theirs, [frames((NOTE, "shm", b"", number))], [file.fileno()])
                while len(owner.outcomes) <= number:
                    await asyncio.sleep(0)
    assert owner.outcomes == ["came", "Too many open files", "came"]
    assert connection.lost is None
    connection.close(PeerLost("it is enough"))


async def test_a_peer_that_announces_another_number_of_descriptors_is_cut_off_and_leaves_none() -> None:
    owner, connection = taking(2)
    ours, theirs = socket.socketpair()
    connection.attach(ours)
    before = len(open_files())
    with open(os.devnull, "rb") as file, theirs:
        socket.send_fds(theirs, [frames(GREETING, (NOTE, "shm", b"", 2))], [file.fileno()])
        await owner.lost.wait()
    assert isinstance(connection.lost, RemoteProtocolError)
    assert "1 descriptors came, not 2" in str(connection.lost)
    # Both ends of the pair are closed.
    assert len(open_files()) == before - 2


async def test_a_message_is_not_sent_if_its_descriptors_cannot_be_copied_and_the_next_one_is() -> None:
    owner, (ours, theirs) = Owner(), socket.socketpair()
    connection = connection_of(owner)
    with theirs:
        connection.attach(ours)
        theirs.recv(1 << 16)
        with no_more_files(), pytest.raises(OSError, match="Too many open files"):
            connection.send_note("shm", b"lost", (0,))
        connection.send_note("shm", b"kept", (0,))
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        owner.sockets.close_all(fds)
        assert len(fds) == 1
        assert b"kept" in data
        assert b"lost" not in data
        connection.close(PeerLost("the test is over"))
