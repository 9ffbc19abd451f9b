"""The TCP proxy: each fault has its own effect, and no other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from proxy import Faults, Proxy

TEXT = bytes(range(256)) * 40


@contextmanager
def through(proxy_seed: int = 0) -> Generator[tuple[Proxy, socket.socket, socket.socket], None, None]:
    """A proxy, and the two ends of a connection through it: the client's, and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy(listener.getsockname(), seed=proxy_seed) as proxy,
        socket.create_connection(proxy.address, timeout=10) as client,
    ):
        server, _ = listener.accept()
        with server:
            server.settimeout(10)
            yield proxy, client, server


def receive(end: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes and (part := end.recv(nbytes - len(received))):
        received += part
    return received


def receive_pieces(end: socket.socket, nbytes: int) -> list[int]:
    """The sizes of the results of single calls of recv, one for each packet that the kernel had."""
    pieces: list[int] = []
    while sum(pieces) < nbytes:
        pieces.append(len(end.recv(nbytes)))
    return pieces


def test_without_faults_bytes_and_ends_pass_in_both_directions() -> None:
    with through() as (proxy, client, server):
        client.sendall(TEXT)
        client.shutdown(socket.SHUT_WR)
        assert receive(server, len(TEXT) + 1) == TEXT
        server.sendall(TEXT[:99])
        server.close()
        assert receive(client, 100) == TEXT[:99]
        assert (proxy.accepted, proxy.forwarded) == (1, (len(TEXT), 99))


@pytest.mark.parametrize(
    "faults",
    [
        Faults(latency=0.01, jitter=0.02),
        Faults(bandwidth=1e5),
        Faults(slice=7),
        Faults(slice=1, jitter=0.001),
        Faults(gather=0.01),
    ],
)
def test_faults_of_time_and_size_change_no_byte(faults: Faults) -> None:
    with through() as (proxy, client, server):
        proxy.disturb(faults, faults)
        for source, sink in ((client, server), (server, client)):
            for start in range(0, len(TEXT), 1000):
                source.sendall(TEXT[start : start + 1000])
            assert receive(sink, len(TEXT)) == TEXT


def test_latency_holds_back_one_direction_only() -> None:
    with through() as (proxy, client, server):
        proxy.disturb(to_server=Faults(latency=3600))
        client.sendall(b"late")
        server.sendall(b"soon")
        assert receive(client, 4) == b"soon"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1)


def test_a_slicer_of_one_byte_writes_each_byte_by_itself() -> None:
    with through() as (proxy, client, server):
        proxy.disturb(to_server=Faults(slice=1, bandwidth=2000))
        client.sendall(TEXT[:20])
        # The receiver may be slower than the line.
        assert len(receive_pieces(server, 20)) > 10


def test_what_was_gathered_comes_in_one_piece() -> None:
    with through() as (proxy, client, server):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proxy.disturb(to_server=Faults(gather=0.2))
        for byte in range(20):
            client.send(bytes([byte]))
        assert len(receive_pieces(server, 20)) <= 2


def test_a_black_hole_holds_everything_until_it_ends() -> None:
    with through() as (proxy, client, server):
        proxy.disturb(to_server=Faults(black_hole=True))
        client.sendall(b"held")
        server.sendall(b"answer")
        assert receive(client, 6) == b"answer"
        assert proxy.forwarded == (0, 6)
        proxy.heal()
        assert receive(server, 4) == b"held"


def test_a_black_hole_stops_a_sender_that_sends_on() -> None:
    with through() as (proxy, client, _):
        proxy.disturb(to_server=Faults(black_hole=True))
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1 << 25))
        assert proxy.forwarded == (0, 0)


@pytest.mark.parametrize("offset", [0, 1000, len(TEXT) - 1])
def test_one_bit_is_flipped_at_the_chosen_byte(offset: int) -> None:
    with through() as (proxy, client, server):
        proxy.disturb(to_server=Faults(flip_at=offset, slice=300))
        client.sendall(TEXT)
        received = receive(server, len(TEXT))
    changed = [at for at, (was, now) in enumerate(zip(TEXT, received, strict=True)) if was != now]
    assert changed == [offset]
    assert (TEXT[offset] ^ received[offset]).bit_count() == 1


def test_equal_seeds_flip_equal_bits() -> None:
    def flipped(seed: int) -> bytes:
        with through(seed) as (proxy, client, server):
            proxy.disturb(to_server=Faults(flip_at=3))
            client.sendall(bytes(8))
            return receive(server, 8)

    results = [flipped(seed) for seed in range(6)]
    assert results == [flipped(seed) for seed in range(6)]
    assert len(set(results)) > 1


def test_a_connection_is_reset_at_its_limit() -> None:
    with through() as (proxy, client, server):
        proxy.disturb(to_client=Faults(limit=10))
        server.sendall(TEXT[:20])
        received = b""
        with pytest.raises(ConnectionResetError):
            while part := client.recv(100):
                received += part
        assert TEXT[:10].startswith(received)
        assert proxy.forwarded == (0, 10)
        with pytest.raises(ConnectionResetError):
            receive(server, 1)


def test_a_reset_ends_both_sides_and_new_connections_work() -> None:
    with through() as (proxy, client, server):
        client.sendall(b"before")
        assert receive(server, 6) == b"before"
        assert proxy.reset() == 1
        for end in (client, server):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        assert proxy.reset() == 0
        socket.create_connection(proxy.address, timeout=10).close()


def test_half_a_close_leaves_the_other_direction() -> None:
    with through() as (proxy, client, server):
        client.sendall(b"x")
        assert receive(server, 1) == b"x"
        proxy.half_close(to_server=True)
        assert receive(server, 1) == b""
        server.sendall(b"still")
        assert receive(client, 5) == b"still"


def test_a_target_that_refuses_is_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        target = unused.getsockname()
    with (
        Proxy(target) as proxy,
        pytest.raises(ConnectionResetError),
        socket.create_connection(proxy.address, timeout=10) as client,
    ):
        client.recv(1)


def test_many_connections_have_faults_of_their_own() -> None:
    echoed: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for _ in range(20):
            end, _ = listener.accept()
            with end:
                end.sendall(receive(end, 50))

    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()) as proxy:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        proxy.disturb(to_server=Faults(flip_at=49))
        for _ in range(20):
            with socket.create_connection(proxy.address, timeout=10) as client:
                client.sendall(bytes(50))
                echoed.append(receive(client, 50))
        thread.join()
    assert all(sum(text).bit_count() == 1 and text[49] for text in echoed)
