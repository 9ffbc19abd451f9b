"""The end of torch's waits when a member is lost."""

from __future__ import annotations

import socket
import struct

from transport_probes import no_more_files

from aiodaft._runtime.groups.process_group import TorchSockets


def test_each_pair_is_given_one_connection_however_often_they_are_shut() -> None:
    sockets = TorchSockets(3)
    pairs: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(4):
            sockets.shut()
        # The next one is not in its place.
        with socket.create_connection(listener.getsockname()) as last:
            last.sendall(struct.pack("=q", 99))
            while pairs[-1:] != [99]:
                with listener.accept()[0] as accepted:
                    pairs.append(struct.unpack("=q", accepted.recv(8))[0])
    assert pairs == [0, 1, 2, 99]


def test_without_descriptors_nothing_is_shut_and_the_next_time_it_is() -> None:
    sockets = TorchSockets(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with no_more_files():
            sockets.shut()
        sockets.shut()
        with listener.accept()[0] as accepted:
            assert struct.unpack("=q", accepted.recv(8)) == (0,)
