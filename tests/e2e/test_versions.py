"""Programs and nodes of another release, another Python or another wire version are refused, with both versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from clusters import Cluster, cluster_of

import aiodaft
from aiodaft._protocol.connections import messages, session
from aiodaft._runtime.connections import far
from aiodaft_transport import handshake

pytestmark = pytest.mark.timeout(120)

# Runs `aiodaft` as if it was of another release.
OTHER_RELEASE = """
from aiodaft._runtime.connections import far
far.SOFTWARE = far.SOFTWARE._replace(release="0.99.0")
from aiodaft.cli.__main__ import main
raise SystemExit(main())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("versions") / "key", "n1") as made:
        yield made


async def attach(cluster: Cluster) -> None:
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file):
        pass


async def test_the_last_number_of_release_and_python_does_not_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor, last = aiodaft.__version__.split(".")
    here = far.SOFTWARE._replace(release=f"{major}.{minor}.{int(last) + 1}", python=f"{far.SOFTWARE.python}1")
    monkeypatch.setattr(far, "SOFTWARE", here)
    await attach(cluster)


@pytest.mark.parametrize(
    ("what", "other", "said"),
    [("release", "0.99.0", "aiodaft"), ("python", "cpython 3.99.1", "Python"), ("python", "pypy 3.11.1", "Python")],
)
async def test_a_program_of_another_release_or_python_is_refused_when_it_attaches(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str, other: str, said: str
) -> None:
    theirs = getattr(far.SOFTWARE, what)
    monkeypatch.setattr(far, "SOFTWARE", far.SOFTWARE._replace(**{what: other}))
    with pytest.raises(aiodaft.exceptions.VersionMismatch) as refused:
        await attach(cluster)
    assert f"the node at {cluster.address} runs {said} {theirs}, and this process {other}: " in str(refused.value)


def test_a_node_of_another_release_does_not_join(cluster: Cluster) -> None:
    command = [sys.executable, "-c", OTHER_RELEASE, "join", cluster.address, "--name", "n2"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert f"runs aiodaft {aiodaft.__version__}, and this process 0.99.0: " in done.stderr


async def test_a_program_of_the_handshake_before_this_one_is_told_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "VERSION", 2)
    monkeypatch.setattr(handshake, "OLDEST_VERSION", 2)
    with pytest.raises(
        aiodaft.exceptions.VersionMismatch, match="speaks versions 3 to 3 of the handshake, this process 2 to 2"
    ):
        await attach(cluster)


async def test_another_wire_version_is_refused_with_both(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (messages, session):
        monkeypatch.setattr(module, "WIRE_VERSION", 8)
        monkeypatch.setattr(module, "OLDEST_WIRE_VERSION", 7)
    with pytest.raises(aiodaft.exceptions.RemoteProtocolError, match="wire versions 1 to 1, this process 7 to 8"):
        await attach(cluster)
