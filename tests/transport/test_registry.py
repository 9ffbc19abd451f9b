"""A transport's name leads to that transport, and a wrong name says what there is."""

from __future__ import annotations

import os

import pytest
from ends import LocalHost
from transports import TRANSPORTS, needs_ucx, why_no_ucx

from aiodaft_transport import Unreachable, check_name, choose_name, default_name, open_transport, reached_by
from aiodaft_transport.registry import NAMES
from aiodaft_transport.shm import ShmTransport
from aiodaft_transport.tcp import TcpTransport
from aiodaft_transport.ucx import INTERFACE_VARIABLE
from aiodaft_transport.ucx.transport import UcxTransport
from aiodaft_transport.ucx.ucp import LIBRARY_VARIABLE

_KINDS = [("shm", ShmTransport), pytest.param("ucx", UcxTransport, marks=needs_ucx), ("tcp", TcpTransport)]


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system such as macOS."""
    monkeypatch.delattr(os, "memfd_create")


def usable() -> list[str]:
    return [name for name in NAMES if name != "ucx" or not why_no_ucx()]


@pytest.mark.parametrize(("name", "kind"), _KINDS)
def test_a_name_opens_the_transport_that_bears_it(name: str, kind: type) -> None:
    transport = open_transport(name, LocalHost())
    assert type(transport) is kind
    assert transport.name == name
    transport.close()


def test_every_name_there_is_can_be_opened_and_closed_twice() -> None:
    for name in usable():
        transport = open_transport(name, LocalHost())
        transport.close()
        transport.close()


def test_opening_a_transport_opens_no_file_and_no_port() -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = [open_transport(name, LocalHost()) for name in usable()]
    assert len(os.listdir("/proc/self/fd")) == before
    for transport in opened:
        transport.close()


@pytest.mark.parametrize("name", ["", "SHM", "ucx ", "nccl", "shm://"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(Unreachable, match=f"no transport {name!r}; there are shm, ucx, tcp"):
        check_name(name)
    with pytest.raises(Unreachable, match="there are shm, ucx, tcp"):
        open_transport(name, LocalHost())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_known_name_is_returned_as_it_is(name: str) -> None:
    assert check_name(name) == name


def test_processes_of_one_host_share_memory_where_they_can() -> None:
    assert default_name() == "shm" == NAMES[0]


@pytest.mark.usefixtures("without_memfd")
def test_without_memfd_shm_is_refused_with_the_alternative() -> None:
    with pytest.raises(Unreachable, match=r"needs memfd_create.*use 'tcp'"):
        open_transport("shm", LocalHost())


@pytest.mark.usefixtures("without_memfd")
def test_without_memfd_tcp_is_what_is_used() -> None:
    assert check_name(default_name()) == "tcp"


@pytest.mark.parametrize(
    ("asked", "one_machine", "ucx", "chosen"),
    [
        (None, True, True, "shm"),
        ("tcp", True, False, "tcp"),
        ("ucx", True, False, "ucx"),
        (None, False, False, "tcp"),
        (None, False, True, "ucx"),
        ("tcp", False, True, "tcp"),
        ("ucx", False, True, "ucx"),
    ],
)
def test_a_pair_of_processes_gets_the_best_transport_between_them(
    asked: str | None, one_machine: bool, ucx: bool, chosen: str
) -> None:
    assert choose_name(asked, one_machine=one_machine, ucx=ucx) == chosen


@pytest.mark.parametrize(("asked", "why"), [("shm", "use 'tcp'"), ("ucx", f"set {INTERFACE_VARIABLE} there")])
def test_a_transport_that_does_not_lead_to_another_machine_is_refused(asked: str, why: str) -> None:
    with pytest.raises(Unreachable, match=f"transport '{asked}' does not lead to another machine.*{why}"):
        choose_name(asked, one_machine=False, ucx=False)


@needs_ucx
def test_ucx_leads_here_from_other_machines_only_over_a_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    assert reached_by() == ()
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    assert reached_by() == ("ucx",)


def test_an_interface_without_libucp_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libucp.so")
    with pytest.raises(Unreachable, match="libucp"):
        reached_by()


@pytest.mark.parametrize(("interface", "error"), [("all", ValueError), ("lo,eth0", ValueError), ("nix9", Unreachable)])
def test_an_interface_that_cannot_be_the_one_is_refused(
    interface: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, interface)
    with pytest.raises(error, match="interface"):
        reached_by()
