"""`aiodaft run`: a script with a cluster, on this machine or on those of a job of Slurm or torchrun."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.dialing import TcpNetwork
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.connections.identity import (
    VARIABLE,
    Identity,
    find_key_file,
    key_content,
    read_private,
    write_private,
)
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.node_process import NodeProcess
from aiodaft._runtime.platform.linux import die_with_parent, interface_to
from aiodaft._runtime.platform.tasks import private_file
from aiodaft._runtime.process import Env
from aiodaft.cli.key import new_certificate
from aiodaft.cli.node import Offers, make_node, new_term, offers_options
from aiodaft.cli.options import Failed, seconds
from aiodaft.exceptions import DaftError, LaunchFailed
from aiodaft.program import run as run_main
from aiodaft_transport import TransportError
from aiodaft_transport.handshake import KEY_SIZE

# The meeting of the tasks of a job: rank 0 writes its address, and the key, to a file on a shared folder.
#
# Readers refuse a file that another user could have read or made. It is whole as soon as it has its name, and is there
# only until all tasks have come.

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
        rank: 0 runs the script.
        job: Unique among the jobs of the user; the name of a file.
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


ALONE: Final = Task(0, 1, "", listen_at="127.0.0.1")


def find_task(environ: Mapping[str, str]) -> Task:
    """`ALONE` if no engine has set the variables. Those of torchrun count, if there are both.

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


class _Job(NamedTuple):
    command: Sequence[str]
    listen: str | None
    name: str | None
    wait: float
    offers: Offers


# Options behind the script are for the script.
@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--listen", help="The address to listen at.  [default: any port of the address that the engine names]")
@click.option("--name", help="The name of this node.  [default: the engine's name of the machine]")
@click.option(
    "--shared",
    type=click.Path(path_type=Path),
    help="A folder that all machines see.  [default: ~/.config/aiodaft/jobs]",
)
@click.option(
    "--wait",
    type=seconds(),
    default=120.0,
    show_default=True,
    help="Seconds that all machines have to come.",
)
@offers_options
def run(script: str, arguments: Sequence[str], shared: Path | None, **given: Any) -> int:
    """Run a script with a cluster.

    The cluster is of this machine, or of a job's machines. The exit status is that of the script.
    """
    return run_main(_run_script(_Job([sys.executable, script, *arguments], **given), shared))


async def _run_script(job: _Job, shared: Path | None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        task = find_task(os.environ)
        folder = shared or find_key_file(None, {}).parent / "jobs"
        named = job._replace(name=job.name or task.node)
        return await (_follow if task.rank else _lead)(task, named, folder / task.job)
    except (DaftError, TransportError, OSError, ValueError) as error:
        raise Failed(str(error)) from error


async def _lead(task: Task, job: _Job, meeting: Path) -> int:
    identity = Identity(key_content(os.urandom(KEY_SIZE), *new_certificate()))
    listen = job.listen or str(Address(_host_to_listen_at(task), 0))
    node = make_node(job.name, None, listen, job.offers, identity, Coordinator(stored=new_term()))
    address = await node.open()
    try:
        if task is not ALONE:
            await _gather(node, task.size, job.wait, meeting, address, identity)
        with private_file("aiodaft-key", identity.packed()) as key_file:
            environment = {**os.environ, "AIODAFT_ADDRESS": address, VARIABLE: key_file}
            return await _script_ended(job.command, environment, node, forward=not task.signals_all)
    finally:
        await node.end_others()
        await node.aclose()


def _host_to_listen_at(task: Task) -> str:
    return interface_to(str(Address(task.seen_from, 1))) if task.seen_from else task.listen_at


async def _gather(
    node: NodeProcess, size: int, patience: float, meeting: Path, address: str, identity: Identity
) -> None:
    try:
        async with asyncio.timeout(patience):
            with published(meeting, address, identity):
                await node.wait_nodes(lambda count: count >= size)
    except TimeoutError:
        raise LaunchFailed(
            f"not all {size} tasks of the job came within {patience:g} s: they look for this one in {meeting.parent}, "
            "a folder that all machines have to see (--shared names another)"
        ) from None


async def _script_ended(
    command: Sequence[str], environment: dict[str, str], node: NodeProcess, *, forward: bool
) -> int:
    """Run the script. Signals are for it, and this process outlives it. Returns its exit status, as a shell does."""
    die_too = partial(die_with_parent, os.getpid())
    process = await asyncio.create_subprocess_exec(*command, env=environment, preexec_fn=die_too)

    def terminate() -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)

    # An engine that signals all processes has told it already, and so has a terminal; a second signal ends it at once.
    _on_signals(terminate if forward else _leave, _leave)
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(_when_ended(node, terminate), name="end the script with the cluster")
        status = await process.wait()
        ending.cancel()
    return 128 - status if status < 0 else status


async def _when_ended(node: NodeProcess, terminate: Callable[[], None]) -> None:
    await node.run()
    terminate()


def _leave() -> None: ...


async def _follow(task: Task, job: _Job, meeting: Path) -> int:
    address, identity = await meet(meeting, Env().new_peer_id("node", "guest"), job.wait)
    listen = job.listen or str(Address(interface_to(address), 0))
    node = make_node(job.name, address, listen, job.offers, identity, Coordinator())
    await node.open()
    # It stays for the cleanup of a script that is told to end, and ends with it. Except under an engine that signals
    # all processes, and may do so again, a second signal ends it at once.
    asked = chain([_leave], repeat(_leave if task.signals_all else node.end))
    _on_signals(lambda: next(asked)(), lambda: next(asked)())
    node.end_when_alone()
    await node.run()
    await node.aclose()
    return 1 if node.is_alone or node.problem is not None else 0


def _on_signals(terminate: Callable[[], None], interrupt: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
