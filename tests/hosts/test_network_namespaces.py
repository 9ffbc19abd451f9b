"""Hosts of a test network reach each other, have each fault that a test asks for, and leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from leaks import is_alive
from network_namespaces import Host, Network, network

FAMILIES = [socket.AF_INET, socket.AF_INET6]


@pytest.fixture
def net() -> Iterator[Network]:
    with network("one", "two", "three") as made:
        yield made


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-ISc", code, *arguments]


@contextmanager
def connected(
    client: Host, server: Host, family: socket.AddressFamily = socket.AF_INET
) -> Generator[tuple[socket.socket, socket.socket], None, None]:
    """Both ends of a connection."""
    with server.listen(family) as listener, client.open_socket(family) as near:
        near.settimeout(10)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            far.settimeout(10)
            yield near, far


def can_connect(
    client: Host, server: Host, family: socket.AddressFamily = socket.AF_INET, patience: float = 0.2
) -> bool:
    with server.listen(family) as listener, client.open_socket(family) as end:
        end.settimeout(patience)
        try:
            end.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


def datagrams_that_arrive(source: Host, destination: Host, count: int) -> int:
    """Of so many; TCP would send lost ones again."""
    arrived = 0
    with source.open_socket(kind=socket.SOCK_DGRAM) as near, destination.open_socket(kind=socket.SOCK_DGRAM) as far:
        far.bind((destination.address, 0))
        far.setblocking(False)
        for _ in range(count):
            near.sendto(b"datagram", far.getsockname())
            with suppress(BlockingIOError):
                arrived += bool(far.recv(9))
        far.settimeout(0.05)
        while True:
            # One of these arrives, after all others.
            near.sendto(b"", far.getsockname())
            with suppress(TimeoutError):
                if not far.recv(9):
                    return arrived
                arrived += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_hosts_reach_each_other(net: Network, family: socket.AddressFamily) -> None:
    assert all(can_connect(a, b, family) for a in net.hosts for b in net.hosts)


def test_hosts_have_names_and_networks_of_their_own(net: Network) -> None:
    tell = "import os; print(os.uname().nodename, *sorted(os.listdir('/proc/self/net/dev_snmp6')))"
    told = [host.run(python(tell)).stdout.split() for host in net.hosts]
    assert told == [[name, "eth0", "lo"] for name in ("one", "two", "three")]
    assert os.uname().nodename not in ("one", "two", "three")
    one, two, _ = net.hosts
    with one.listen(port=7777), two.listen(port=7777):
        assert one.address != two.address


@pytest.mark.parametrize("family", FAMILIES)
def test_a_partition_cuts_both_directions_of_one_side_only(net: Network, family: socket.AddressFamily) -> None:
    one, two, three = net.hosts
    net.partition(one, two)
    reached = {(a.name, b.name) for a in net.hosts for b in net.hosts if a is not b and can_connect(a, b, family)}
    assert reached == {("one", "two"), ("two", "one")}
    net.heal()
    assert can_connect(three, one, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_one_way_drop_lets_the_other_direction_through(net: Network, family: socket.AddressFamily) -> None:
    one, two, _ = net.hosts
    with connected(one, two, family) as (near, far):
        net.drop(one, two)
        near.sendall(b"lost")
        far.sendall(b"there")
        assert near.recv(9) == b"there"
        far.settimeout(0.1)
        with pytest.raises(TimeoutError):
            far.recv(9)
        net.heal()
        far.settimeout(10)
        assert far.recv(9) == b"lost"


def test_a_connection_outlives_a_short_partition(net: Network) -> None:
    one, two, _ = net.hosts
    with connected(one, two) as (near, far):
        net.partition(one)
        near.sendall(b"patience")
        net.heal()
        assert far.recv(9) == b"patience"


def test_a_part_of_the_packets_is_lost_where_and_how_often_the_test_says(net: Network) -> None:
    one, two, three = net.hosts
    net.drop(one, two, 30)
    # Six standard deviations each way.
    assert 600 < datagrams_that_arrive(one, two, 1000) < 800
    assert datagrams_that_arrive(two, one, 1000) == 1000
    assert datagrams_that_arrive(one, three, 1000) == 1000
    net.lose(60)
    assert 300 < datagrams_that_arrive(three, two, 1000) < 500
    net.heal()
    assert datagrams_that_arrive(one, two, 1000) == 1000


def test_connections_with_one_host_are_reset(net: Network) -> None:
    one, two, three = net.hosts
    with connected(one, two) as (near, far), connected(one, three) as (other, _):
        assert one.reset_connections(two) == 1
        with pytest.raises(ConnectionAbortedError):
            near.recv(1)
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.recv(1)
    assert one.reset_connections(two) == 0


def test_an_unplugged_host_is_silent_until_it_is_plugged_in(net: Network) -> None:
    one, two, three = net.hosts
    net.unplug(two)
    assert not can_connect(one, two)
    assert can_connect(one, three)
    net.plug(two)
    # The kernel takes up to a second to notice a cable.
    assert can_connect(one, two, patience=10)


def test_a_limited_host_gets_and_sends_what_its_line_carries(net: Network) -> None:
    one, two, three = net.hosts
    net.limit(two, 1_000_000)
    # That takes half a minute where the line is slow.
    assert not can_send(one, two, 1 << 22, patience=0.3)
    assert not can_send(two, one, 1 << 22, patience=0.3)
    assert can_send(one, three, 1 << 22)
    net.heal()
    assert can_send(one, two, 1 << 22)


def can_send(source: Host, destination: Host, nbytes: int, patience: float = 10) -> bool:
    with connected(source, destination) as (near, far), ThreadPoolExecutor(1) as reader:
        reader.submit(lambda: all(iter(lambda: far.recv(1 << 16), b"")))
        near.settimeout(patience)
        try:
            near.sendall(bytes(nbytes))
        except TimeoutError:
            return False
        finally:
            far.shutdown(socket.SHUT_RD)
        return True


def test_processes_of_a_host_get_signals_and_an_end(net: Network) -> None:
    host = net.hosts[0]
    # The last one has no parent of ours any more.
    script = "sleep 1000 & echo $!; setsid -f sh -c 'echo $$; exec sleep 1000'; wait"
    sleeping = host.popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert sleeping.stdout is not None
    pids = {sleeping.pid, *(int(sleeping.stdout.readline()) for _ in range(2))}
    # The process that started the last one ends when it likes.
    while host.pids() != pids:
        os.sched_yield()
    host.send_signal(signal.SIGSTOP)
    assert {state_of(pid) for pid in pids} == {"T"}
    host.send_signal(signal.SIGCONT)
    host.end_processes()
    assert not any(is_alive(pid) for pid in pids)


def state_of(pid: int) -> str:
    """The state of a process, when a signal for it has been delivered."""
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) in "RS":
        os.sched_yield()
    return state


def test_failed_commands_say_what_they_wrote(net: Network) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        net.hosts[0].run(["sh", "-c", "echo why >&2; exit 3"])
    assert (failed.value.returncode, failed.value.stderr) == (3, "why\n")


@pytest.mark.usefixtures("net")
def test_nothing_is_left_of_a_test_that_is_killed() -> None:
    script = """
import os, subprocess, sys
sys.path[:0] = sys.argv[1:]
from network_namespaces import network
with network("one", "two") as net:
    sleeping = net.hosts[0].popen(["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    # Now it is on that host.
    sleeping.stdout.readline()
    print(os.getpid(), sleeping.pid, *(host.namespace.keeper.pid for host in net.hosts), flush=True)
    sys.stdin.read()
"""
    support = str(Path(__file__).parents[1] / "support")
    argv = [sys.executable, "-c", script, support]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        pids = [int(pid) for pid in test.stdout.readline().split()]
        assert len(pids) == 4, "the same happens here"
        test.kill()
    while any(is_alive(pid) for pid in pids):
        os.sched_yield()


def test_a_user_who_is_not_root_has_hosts_too() -> None:
    script = """
import sys
sys.path[:0] = sys.argv[1:]
from network_namespaces import network
with network("one", "two") as net:
    one, two = net.hosts
    with two.listen() as listener, one.open_socket() as end:
        end.connect(listener.getsockname())
    net.partition(one)
    print(one.run(["hostname"]).stdout)
"""
    support = str(Path(__file__).parents[1] / "support")
    as_user = ["unshare", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    argv = [*as_user, sys.executable, "-c", script, support]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    if "Skipped" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.split() == ["one"], done.stderr
