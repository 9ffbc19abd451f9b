"""The manifests of examples/kubernetes: they follow the published schemas, and their pods make a cluster."""

from __future__ import annotations

import copy
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs the package kubernetes-validate")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
NAMES = ["aiodaft-0", "aiodaft-1", "aiodaft-2"]
FILES = ("cluster.yaml", "program.yaml")
pytestmark = [pytest.mark.programs, pytest.mark.timeout(180)]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for name in FILES for document in documents(name) if document["kind"] == kind]
    return found


def container_of(kind: str) -> dict[str, Any]:
    (container,) = of_kind(kind)["spec"]["template"]["spec"]["containers"]
    return container


VALID = [document for name in FILES for document in documents(name)]


@pytest.mark.parametrize("document", VALID, ids=lambda document: document["kind"])
def test_manifests_follow_the_published_schemas(document: dict[str, Any]) -> None:
    for version in ("1.29", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_check_finds_mistakes() -> None:
    wrong = copy.deepcopy(of_kind("StatefulSet"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_names_and_ports_agree() -> None:
    service, pods, node = of_kind("Service"), of_kind("StatefulSet"), container_of("StatefulSet")
    assert service["spec"]["clusterIP"] == "None"
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == pods["spec"]["template"]["metadata"]["labels"]
    assert pods["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (port,) = node["ports"]
    assert {port["containerPort"]} == {entry["port"] for entry in service["spec"]["ports"]}
    first = f"tcp://{pods['metadata']['name']}-0.{service['metadata']['name']}:{port['containerPort']}"
    assert first in node["command"][-1]
    assert {"name": "AIODAFT_ADDRESS", "value": first} in container_of("Job")["env"]
    for kind in ("StatefulSet", "Job"):
        spec = of_kind(kind)["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container_of(kind)["volumeMounts"]} == volumes


class Pods:
    """The pods that the kubelet would start, here as processes: each has an address of 127.0.0.0/8."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = str(probe.getsockname()[1])
        (folder / "secret").mkdir()
        subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", folder / "secret" / "key"], check=True)
        # As fsGroup and defaultMode make it.
        (folder / "secret" / "key").chmod(0o440)

    def start(self, kind: str, name: str, ip: str) -> subprocess.Popen[str]:
        """Start the container of a pod, as its manifest says."""
        container, run = container_of(kind), self._folder / name
        # A container that is restarted finds the files in the volumes of its pod.
        run.mkdir(exist_ok=True)
        given = {"POD_NAME": name, "POD_IP": ip, "CPUS": "4"}
        variables = {entry["name"]: entry.get("value") or given[entry["name"]] for entry in container["env"]}
        replaced = {
            "/etc/aiodaft": str(self._folder / "secret"), "/run/aiodaft": str(run), "7777": self._port,
            "aiodaft-0.aiodaft": "127.0.0.1",
        }  # fmt: skip

        def here(text: str) -> str:
            for before, after in replaced.items():
                text = text.replace(before, after)
            return text

        environment = {
            **os.environ,
            **{name: here(value) for name, value in variables.items()},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        process = subprocess.Popen(
            [here(word) for word in container["command"]], env=environment, stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(self._end, process)
        return process

    def mode_of_key(self, name: str) -> int:
        return stat.S_IMODE((self._folder / name / "key").stat().st_mode)

    def probe(self, ip: str) -> None:
        """The work of a tcpSocket probe."""
        for _ in range(20):
            socket.create_connection((ip, int(self._port)), timeout=5).close()

    def _end(self, process: subprocess.Popen[str]) -> None:
        with process:
            process.kill()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        yield Pods(tmp_path, stack)


def ready(process: subprocess.Popen[str]) -> str:
    """Wait until a node has said where it listens."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def nodes_of_a_program(pods: Pods) -> list[str]:
    program = pods.start("Job", "aiodaft-program", "")
    shown, _ = program.communicate(timeout=30)
    assert program.returncode == 0
    assert all("4/4 cpus" in line for line in shown.splitlines())
    return [line.split()[0] for line in shown.splitlines()]


def test_what_the_manifests_start_is_a_cluster_that_ends_in_order(pods: Pods) -> None:
    nodes = []
    # One after the other: OrderedReady.
    for number, name in enumerate(NAMES, 1):
        ip = f"127.0.0.{number}"
        nodes.append(pods.start("StatefulSet", name, ip))
        assert ready(nodes[-1]).startswith(f"tcp://{ip}:")
        pods.probe(ip)
        assert pods.mode_of_key(name) == 0o600
    assert nodes_of_a_program(pods) == NAMES
    # Its container is restarted.
    nodes[0].kill()
    nodes[0] = pods.start("StatefulSet", NAMES[0], "127.0.0.1")
    assert ready(nodes[0])
    while nodes_of_a_program(pods) != NAMES:
        pass
    # The drain ends before the kubelet kills.
    assert "--drain 45" in container_of("StatefulSet")["command"][-1]
    grace = of_kind("StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 45
    for node in reversed(nodes):
        node.send_signal(signal.SIGTERM)
        assert node.wait(grace) == 0
