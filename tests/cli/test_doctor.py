"""`aiodaft doctor`, run as a user runs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from clusters import cluster_of

import aiodaft
from aiodaft.cli.__main__ import main
from aiodaft_transport import NAMES, default_name


def aiodaft_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiodaft.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = str(tmp_path / "key")
    assert CliRunner().invoke(main, ["key", "new", path]).exit_code == 0
    return path


def diagnosis(address: str, key_file: str) -> str:
    """The report on a cluster that cannot be used."""
    ended = CliRunner().invoke(main, ["doctor", address, "--key-file", key_file])
    assert ended.exit_code == 1, ended.stdout
    return ended.stdout.partition("cluster          does not work: ")[2]


def test_it_tries_every_transport_and_the_cluster_of_the_environment_and_says_what_it_found(key_file: str) -> None:
    ended = aiodaft_command("doctor", AIODAFT_ADDRESS="tcp://127.0.0.1:1", AIODAFT_KEY_FILE=key_file)
    assert ended.returncode == 1, ended.stderr
    found = {line[:16].strip(): line[17:] for line in ended.stdout.splitlines()}
    for name in (*NAMES, "cuda"):
        assert found[f"transport {name}"].startswith(("works", "does not work: "))
    assert found[f"transport {default_name()}"].startswith("works, the default: 1 MiB there and back in ")
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert "tcp://127.0.0.1:1: Connection refused; 127.0.0.1 leads to the machine itself only" in ended.stdout


def test_the_command_says_its_version_and_what_it_can_do() -> None:
    assert aiodaft_command("--version").stdout == f"aiodaft {aiodaft.__version__}\n"
    without = aiodaft_command()
    assert without.returncode == 2
    assert "doctor" in without.stderr


def test_its_document_has_what_it_says_of_both(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1") as cluster:
        ended = aiodaft_command("doctor", "--json", **cluster.environment)
    document = json.loads(ended.stdout)
    assert (ended.returncode, ended.stderr, document["works"], document["problems"]) == (0, "", True, [])
    assert document["transports"][default_name()]["seconds"] > 0
    assert document["machine"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert document["hosts"]["n1"]["address"] == cluster.address
    (way,) = document["ways"]
    assert (way["from"], way["to"], way["interface"]) == ("(here)", "n1", "lo")
    assert min(way["call_seconds"], way["tcp_bytes_per_second"]) > 0


@pytest.mark.timeout(120)
def test_it_says_what_keeps_this_machine_out_of_a_cluster(tmp_path: Path, key_file: str) -> None:
    with cluster_of(tmp_path / "other key", "n1") as cluster:
        assert "it has another key; copy the key file of the cluster" in diagnosis(cluster.address, key_file)
        port = cluster.address.rpartition(":")[2]
    assert f"tcp://127.0.0.1:{port}: Connection refused; " in diagnosis(cluster.address, key_file)
    assert "0.0.0.0 means all interfaces" in diagnosis(f"tcp://0.0.0.0:{port}", key_file)
    assert "aiodaft key new" in diagnosis("tcp://127.0.0.1:1", str(tmp_path / "none"))


def test_it_says_that_another_program_listens(key_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "aiodaft.cli", "doctor", address, "--key-file", key_file]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            stranger, _ = listener.accept()
            with stranger:
                stranger.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(60))
                assert "does not speak this protocol; another program listens there" in process.communicate()[0]


def test_it_refuses_to_look_for_a_node_that_there_is_not(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1") as cluster:
        ended = aiodaft_command("doctor", cluster.address, "n1", "n7", "--key-file", str(cluster.key_file))
    assert ended.returncode == 1
    assert "there is no node n7, only n1" in ended.stdout
