"""The task of a job that this process is, by the variables of Slurm and of torchrun."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.dialing import TcpNetwork
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.connections.identity import Identity, read_private, write_private
from aiodaft.exceptions import DaftError, LaunchFailed
from aiodaft_transport import TransportError

# The meeting of the tasks of a job: rank 0 writes its address, and the key, to a file on a shared folder.
#
# Only its user can read the file, and readers refuse one that another user could have read or made. It is whole as soon
# as it has its name, and is there only until all tasks have come.

# Seconds between two looks: at first, and at most.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0


@contextmanager
def published(path: Path, address: str, identity: Identity) -> Generator[None]:
    """Have the file there for the time of the block, in place of one that an earlier run of the job has left.

    Raises:
        KeyFileError: It cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")
    write_private(new, f"{address}\n".encode() + identity.packed())
    os.replace(new, path)
    try:
        yield
    finally:
        # A task of a later run may have replaced it.
        with suppress(OSError):
            path.unlink()


async def meet(path: Path, local: PeerId, patience: float) -> tuple[str, Identity]:
    """Wait until rank 0 has written the file, and answers. Returns its address, and the key.

    Raises:
        LaunchFailed: It did not within `patience` seconds.
    """
    pause, why = _FIRST_PAUSE, "it has written no file"
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                try:
                    first, _, key = read_private(path).partition(b"\n")
                    found = str(parse_address(first.decode("ascii", errors="replace"))), Identity(key)
                    await who_listens(TcpNetwork(found[1]), local, found[0])
                    return found
                except (DaftError, TransportError, OSError, ValueError) as error:
                    # Also the file of an earlier run, which is replaced.
                    why = str(error)
                # No signal tells this machine of another one's writes to a shared folder.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    raise LaunchFailed(
        f"rank 0 did not answer within {patience:g} s ({path}): {why}; --shared names a folder that all machines see"
    )


_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Only `srun` sets them; the script of `sbatch` is no task of a step.
_SLURM: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")


class Task(NamedTuple):
    """One of the processes that an engine starts for a job, one on each machine.

    Attributes:
        rank: Its number; 0 runs the script.
        size: The number of tasks.
        job: The name of the job among those of the user; the name of a file.
        node: The engine's name of the machine; empty: its own name counts.
        listen_at: The host name or address of rank 0 that the others reach; empty: see `seen_from`.
        seen_from: An address; rank 0 listens on the interface to it.
        signals_all: Whether the engine sends its signals to each process of the task, also to those that it starts.
    """

    rank: int
    size: int
    job: str
    node: str = ""
    listen_at: str = ""
    seen_from: str = ""
    signals_all: bool = False


# Without an engine.
ALONE: Final = Task(0, 1, "", listen_at="127.0.0.1")


def find_task(environ: Mapping[str, str]) -> Task:
    """Read the variables; `ALONE` if no engine has set them. Those of torchrun count, if there are both.

    Raises:
        ValueError: They contradict each other, or there are several tasks on a machine.
    """
    if all(name in environ for name in _TORCHRUN):
        rank, size, host, port = (environ[name] for name in _TORCHRUN)
        job = _file_name("torchrun", host, port, environ.get("TORCHELASTIC_RUN_ID", ""))
        task = Task(_number(rank), _number(size), job, listen_at=host)
        crowded = _number(environ.get("LOCAL_WORLD_SIZE", "1")) > 1
        return _checked(task, environ.get("LOCAL_RANK", "0"), crowded)
    if all(name in environ for name in _SLURM):
        rank, size, number, step = (environ[name] for name in _SLURM)
        task = Task(
            _number(rank),
            _number(size),
            _file_name("slurm", environ.get("SLURM_CLUSTER_NAME", ""), number, step),
            node=environ.get("SLURMD_NODENAME", ""),
            seen_from=environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
            signals_all=True,
        )
        # The task with number 0 of a machine would wait for those that are refused.
        crowded = task.size > _number(environ.get("SLURM_STEP_NUM_NODES", size))
        return _checked(task, environ.get("SLURM_LOCALID", "0"), crowded)
    return ALONE


def _checked(task: Task, local_rank: str, crowded: bool) -> Task:
    if not 0 <= task.rank < task.size:
        raise ValueError(f"the engine says that this is task {task.rank} of {task.size}, which cannot be")
    if _number(local_rank) or crowded:
        raise ValueError(
            "several tasks of the job are on one machine: start one on each (`srun --ntasks-per-node=1`, `torchrun "
            "--nproc-per-node=1`); it offers all CPUs and GPUs that it may use"
        )
    return task


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the engine says {text!r:.80} where a number is needed")
    return int(text)


def _file_name(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9_.]", "_", part) for part in parts if part)
