"""The valid values of `--state`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from aiodaft._runtime.coordination.sqlite_store import SqliteStore, store_at


async def test_a_path_is_a_file(tmp_path: Path) -> None:
    store = store_at(str(tmp_path / "state.db"))
    assert isinstance(store, SqliteStore)
    await store.open()
    await store.aclose()
    assert (tmp_path / "state.db").stat().st_size > 0


@pytest.mark.parametrize("state", ["", "http://host:1", "redis://host"])
def test_other_addresses_are_refused(state: str) -> None:
    with pytest.raises(ValueError, match="is neither a file nor etcd://HOST:PORT"):
        store_at(state)


@pytest.mark.parametrize("state", ["etcd://", "etcd://a,", "etcd://u:p@host", "etcd://host:x", "etcd://host:99999"])
def test_an_etcd_needs_hosts_and_ports(state: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT|[Pp]ort"):
        store_at(state)


@pytest.mark.skipif(importlib.util.find_spec("aetcd") is None, reason="aetcd is not installed")
def test_an_etcd_has_members_and_a_prefix() -> None:
    # In a program of its own: gRPC, once loaded, stays.
    code = """
        from aiodaft._runtime.coordination.sqlite_store import store_at
        print(store_at("etcd://a:1,b,[::1]:3/teams/red/"))
        print(store_at("etcd://a"))
    """
    found = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=50, check=True)
    assert found.stdout.splitlines() == ["etcd at a:1,b:2379,::1:3, teams/red/", "etcd at a:2379, aiodaft/"]


def test_without_aetcd_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiodaft._runtime.coordination.etcd_store", raising=False)
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ImportError, match=r"pip install 'aiodaft\[etcd\]'"):
        store_at("etcd://a")
