"""Three members of a real etcd on this machine, which tests kill and start again."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Final

BINARY: Final = shutil.which("etcd")


def free_ports(count: int) -> list[int]:
    """Ports that no program uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class EtcdCluster:
    """The members, by number."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self._folder = folder
        ports = free_ports(2 * count)
        self._clients, self._peers = ports[:count], ports[count:]
        self.addresses = [("127.0.0.1", port) for port in self._clients]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def state(self) -> str:
        """The value for `aiodaft up --state`."""
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self._clients)

    def start(self, member: int) -> None:
        assert BINARY is not None
        peers = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(self._peers))
        client, peer = (f"http://127.0.0.1:{ports[member]}" for ports in (self._clients, self._peers))
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    BINARY, "--name", f"m{member}", "--data-dir", self._folder / f"m{member}",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", peers, "--heartbeat-interval", "100", "--election-timeout", "1000",
                ],
                stdout=log,
                stderr=log,
                # Its settings come from here only.
                env={},
            )  # fmt: skip

    def start_all(self) -> None:
        for member in range(len(self._clients)):
            self.start(member)

    def kill(self, member: int) -> None:
        """SIGKILL."""
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for member in list(self._processes):
            self.kill(member)
