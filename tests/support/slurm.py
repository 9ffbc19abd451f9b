"""A real Slurm of this user on 127.0.0.1: munged, slurmctld, and a slurmd for each of two nodes."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel")


def why_not() -> str | None:
    """The missing programs; None: there are none."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"there is no {', '.join(missing)} (packages munge, slurmctld, slurmd, slurm-client)" if missing else None


@contextmanager
def running_slurm(folder: Path) -> Generator[Mapping[str, str]]:
    """Slurm with the nodes n1 and n2 for the time of the block: the variables that its commands need.

    A job in the partition "urgent" takes the place of one in the default partition.
    """
    user, host = pwd.getpwuid(os.geteuid()).pw_name, socket.gethostname().partition(".")[0]
    ports = _free_ports(3)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        f"ClusterName=aiodaft\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\n"
        f"AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={folder}/munge.socket\n"
        f"SlurmUser={user}\nSlurmdUser={user}\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nSelectType=select/cons_tres\n"
        "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL\nSwitchType=switch/none\nJobAcctGatherType=jobacct_gather/none\nReturnToService=2\nKillWait=20\n"
        f"NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}\n"
        f"NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}\n"
        "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20\n"
        "PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2\n"
    )
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE.items()]
    with ExitStack() as stack:
        for said, command in (
            # It doubts a folder that only its user can enter, where nobody else needs it.
            ("work threads", ["munged", "--foreground", "--force", *munge]),
            ("Running as primary controller", ["slurmctld", "-D", "-i"]),
            ("slurmd started", ["slurmd", "-D", "-N", "n1"]),
            ("slurmd started", ["slurmd", "-D", "-N", "n2"]),
        ):
            stack.enter_context(_daemon(command, environment, said))
        yield environment


_MUNGE = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


@contextmanager
def _daemon(command: Sequence[str], environment: Mapping[str, str], said: str) -> Generator[None]:
    """A daemon that is ready when it has said this."""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            while not lines or (lines[-1] and said not in lines[-1]):
                lines.append(process.stderr.readline())
            assert lines[-1], f"{command[0]} did not start: {''.join(lines)}"
            yield
        finally:
            process.terminate()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]
