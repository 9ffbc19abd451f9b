"""`aiodaft run`: a script with a cluster, on this machine or on those of a job of Slurm or torchrun."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import click

from aiodaft._protocol.connections.address import Address
from aiodaft._runtime.connections.identity import VARIABLE, Identity, find_key_file, key_content
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.node_process import NodeProcess
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.error_log import private_file
from aiodaft._runtime.platform.linux import die_with_parent, interface_to
from aiodaft.exceptions import DaftError, LaunchFailed
from aiodaft.launch.task import ALONE, Task, find_task, meet, published
from aiodaft.program import run as run_main
from aiodaft_transport import TransportError
from aiodaft_transport.handshake import KEY_SIZE

from .key import new_certificate
from .node import Offers, make_node, new_term, offers_options
from .options import Failed, seconds


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
    """Run the script, or a node for the script that another machine runs; returns the exit status."""
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


def _leave() -> None:
    """A signal that others take."""


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
