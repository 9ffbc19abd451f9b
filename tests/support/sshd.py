"""A real sshd of the user that runs the tests, on a port of 127.0.0.1, with keys of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
# The folder of the unprivileged part of a superuser's sshd, which refuses to start without it.
_SEPARATION = Path("/run/sshd")


def why_not() -> str | None:
    """The missing programs; None: there are none."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=_PATH) is None]
    return f"there is no {', '.join(missing)} (packages openssh-server, openssh-client)" if missing else None


class Sshd:
    """The server, and how to reach it.

    Attributes:
        command: `ssh`, with options that lead any host name to this server.
    """

    def __init__(self, process: subprocess.Popen[str], command: Sequence[str]) -> None:
        self.process = process
        self.command = command


@contextmanager
def running_sshd(folder: Path) -> Generator[Sshd]:
    """An sshd for the time of the block; all host names lead to it, except "nowhere"."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=20)
    if os.geteuid() == 0:
        _SEPARATION.mkdir(mode=0o755, exist_ok=True)
    port = _free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
        "PidFile none\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPubkeyAuthentication yes\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"Host nowhere\n  Port {_free_port()}\nHost *\n  HostName 127.0.0.1\n  Port {port}\n  BatchMode yes\n"
        f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  LogLevel ERROR\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {folder}/known_hosts\n"
    )
    sshd = shutil.which("sshd", path=_PATH)
    assert sshd is not None
    arguments = [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            assert any("Server listening" in line for line in lines), "sshd did not start"
            yield Sshd(process, ("ssh", "-F", str(folder / "ssh_config")))
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
