"""A transport's name leads to that transport, and a wrong name says what there is."""

from __future__ import annotations

import os

import pytest
from ends import KEY, LocalHost
from transports import TRANSPORTS, needs_ucx, why_no_ucx

from aiodaft_transport import Unreachable, check_name, default_name, open_transport
from aiodaft_transport.registry import NAMES
from aiodaft_transport.shm import ShmTransport
from aiodaft_transport.tcp import TcpTransport
from aiodaft_transport.ucx.transport import UcxTransport

_KINDS = [("shm", ShmTransport), pytest.param("ucx", UcxTransport, marks=needs_ucx), ("tcp", TcpTransport)]


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system such as macOS."""
    monkeypatch.delattr(os, "memfd_create")


def usable() -> list[str]:
    return [name for name in NAMES if name != "ucx" or not why_no_ucx()]


@pytest.mark.parametrize(("name", "kind"), _KINDS)
def test_a_name_opens_the_transport_that_bears_it(name: str, kind: type) -> None:
    transport = open_transport(name, LocalHost(), KEY, local="here")
    assert type(transport) is kind
    assert transport.name == name
    transport.close()


def test_every_name_there_is_can_be_opened_and_closed_twice() -> None:
    for name in usable():
        transport = open_transport(name, LocalHost(), KEY, local="here")
        transport.close()
        transport.close()


def test_opening_a_transport_opens_no_file_and_no_port() -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = [open_transport(name, LocalHost(), KEY, local="here") for name in usable()]
    assert len(os.listdir("/proc/self/fd")) == before
    for transport in opened:
        transport.close()


@pytest.mark.parametrize("name", ["", "SHM", "ucx ", "nccl", "shm://"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(Unreachable, match=f"no transport {name!r}; there are shm, ucx, tcp"):
        check_name(name)
    with pytest.raises(Unreachable, match="there are shm, ucx, tcp"):
        open_transport(name, LocalHost(), KEY, local="here")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_known_name_is_returned_as_it_is(name: str) -> None:
    assert check_name(name) == name


def test_processes_of_one_host_share_memory_where_they_can() -> None:
    assert default_name() == "shm" == NAMES[0]


@pytest.mark.usefixtures("without_memfd")
def test_without_memfd_shm_is_refused_with_the_alternative() -> None:
    with pytest.raises(Unreachable, match=r"needs memfd_create.*use 'tcp'"):
        open_transport("shm", LocalHost(), KEY, local="here")


@pytest.mark.usefixtures("without_memfd")
def test_without_memfd_tcp_is_what_is_used() -> None:
    assert check_name(default_name()) == "tcp"
