"""Addresses are read in one place, and the error of a wrong one gives the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft._protocol.connections.address import Address, is_name, is_wildcard, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.5:7777", "10.0.0.5", 7777),
        ("tcp://head:1", "head", 1),
        ("tcp://head-0.aiodaft.svc.cluster.local.:65535", "head-0.aiodaft.svc.cluster.local.", 65535),
        ("tcp://[fd00::5]:7777", "fd00::5", 7777),
        ("tcp://[FD00:0::0:5]:7777", "fd00::5", 7777),
        ("tcp://[fe80::1%eth0]:7777", "fe80::1%eth0", 7777),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert parse_address(str(parse_address(text))) == (host, port)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not tcp://HOST:PORT"),
        ("head:7777", "not tcp://HOST:PORT"),
        ("http://head:7777", "not tcp://HOST:PORT"),
        ("tcp://head:7777/", "not tcp://HOST:PORT"),
        ("tcp://fd00::5:7777", "not tcp://HOST:PORT"),
        ("tcp://user@head:7777", "neither a name nor an IP address"),
        ("tcp://head", "has no port"),
        ("tcp://head:", "has no port"),
        ("tcp://head:http", "port is no number"),
        ("tcp://head:-1", "port is no number"),
        ("tcp://head:\u0667", "port is no number"),
        ("tcp://head:1000000", "port is no number"),
        ("tcp://head:65536", "at most 65535"),
        ("tcp://head:0", "port 0 can only be listened at"),
        ("tcp://:7777", "has no host"),
        ("tcp://*:7777", "neither a name nor an IP address"),
        ("tcp://a b:7777", "neither a name nor an IP address"),
        ("tcp://-x:7777", "neither a name nor an IP address"),
        ("tcp://[10.0.0.5]:7777", "no IPv6 address"),
        ("tcp://[]:7777", "no IPv6 address"),
    ],
)
def test_what_is_no_address_says_why_and_what_one_looks_like(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*Write tcp://10\.0\.0\.5:7777"):
        parse_address(text)


def test_any_free_port_can_be_listened_at() -> None:
    assert parse_address("tcp://127.0.0.1:0", to_listen=True) == ("127.0.0.1", 0)


@pytest.mark.parametrize("ip", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_all_interfaces_are_a_wildcard(ip: str) -> None:
    assert is_wildcard(ip)


@pytest.mark.parametrize("ip", ["127.0.0.1", "10.0.0.5", "::1", "fe80::1%eth0", "::ffff:10.0.0.5"])
def test_one_interface_is_no_wildcard(ip: str) -> None:
    assert not is_wildcard(ip)


@given(st.text() | st.text().map("tcp://".__add__) | st.from_regex(r"tcp://\[?[0-9a-f:.%]*\]?:[0-9]{0,6}"))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        with pytest.raises(ValueError, match="is no address of a node"):
            parse_address(text)
    else:
        assert isinstance(address, Address)
        assert parse_address(str(address)) == address


def test_names_of_hosts_are_told_from_ip_addresses() -> None:
    assert [is_name(host) for host in ("head", "10.0.0.5.example", "10.0.0.5", "fd00::5")] == [True, True, False, False]
