"""`aiodaft run`: a script with a cluster, on this machine or on those of a job of Slurm or torchrun."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path

from aiodaft._protocol.connections.address import Address
from aiodaft._runtime.connections.identity import VARIABLE, Identity, find_key_file, key_content
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.node_process import NodeProcess
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.interfaces import interface_to
from aiodaft._runtime.platform.linux import die_with_parent
from aiodaft.exceptions import DaftError, LaunchFailed
from aiodaft.launch.rendezvous import meet, published
from aiodaft.launch.task import ALONE, Task, find_task
from aiodaft_transport import TransportError
from aiodaft_transport.handshake import KEY_SIZE

from .key import new_certificate
from .node import add_offers, make_node, new_term


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of `aiodaft run`."""
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    parser.add_argument("--listen", help="where to listen; default: any port of the address that the engine names")
    parser.add_argument("--name", help="the name of this node; default: what the engine calls the machine")
    parser.add_argument("--shared", type=Path, help="a folder that all machines see; default: ~/.config/aiodaft/jobs")
    parser.add_argument(
        "--wait", type=float, default=120.0, help="seconds that all machines have to come; default: 120"
    )
    add_offers(parser)


async def run_script(arguments: argparse.Namespace) -> int:
    """Run the script, or a node for the script that another machine runs; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        task = find_task(os.environ)
        arguments.name = arguments.name or task.node
        folder = arguments.shared or find_key_file(None, {}).parent / "jobs"
        return await (_follow if task.rank else _lead)(task, arguments, folder / task.job)
    except (DaftError, TransportError, OSError, ValueError) as error:
        sys.stderr.write(f"aiodaft: {error}\n")
        return 1


async def _lead(task: Task, arguments: argparse.Namespace, meeting: Path) -> int:
    identity = Identity(key_content(os.urandom(KEY_SIZE), *new_certificate()))
    listen = arguments.listen or str(Address(_host_to_listen_at(task), 0))
    node = make_node(arguments, None, listen, identity, Coordinator(stored=new_term()))
    address = await node.open()
    try:
        if task is not ALONE:
            await _gather(node, task.size, arguments.wait, meeting, address, identity)
        with _key_file(identity) as key_file:
            environment = {**os.environ, "AIODAFT_ADDRESS": address, VARIABLE: key_file}
            command = [sys.executable, arguments.script, *arguments.arguments]
            return await _script_ended(command, environment, node, forward=not task.signals_all)
    finally:
        await node.end_others()
        await node.aclose()


def _host_to_listen_at(task: Task) -> str:
    return interface_to(str(Address(task.seen_from, 1))) if task.seen_from else task.listen_at


async def _gather(
    node: NodeProcess, size: int, patience: float, meeting: Path, address: str, identity: Identity
) -> None:
    """Wait for the nodes of the other tasks."""
    try:
        async with asyncio.timeout(patience):
            with published(meeting, address, identity):
                await node.wait_nodes(lambda count: count >= size)
    except TimeoutError:
        raise LaunchFailed(f"not all {size} tasks of the job came within {patience:g} s") from None


@contextmanager
def _key_file(identity: Identity) -> Generator[str]:
    """A key file in memory, for processes of this user on this machine, as long as this process lives."""
    fd = os.memfd_create("aiodaft-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, identity.packed())
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


async def _script_ended(command: list[str], environment: dict[str, str], node: NodeProcess, *, forward: bool) -> int:
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
    """Do this when `aiodaft down` has ended the node."""
    await node.run()
    terminate()


def _leave() -> None:
    """A signal that others take."""


async def _follow(task: Task, arguments: argparse.Namespace, meeting: Path) -> int:
    address, identity = await meet(meeting, Env().new_peer_id("node", "guest"), arguments.wait)
    listen = arguments.listen or str(Address(interface_to(address), 0))
    node = make_node(arguments, address, listen, identity, Coordinator())
    await node.open()
    # It stays for what the script does when it is told to end, and ends with it. Others than an engine that signals all
    # processes, and may do so again, end it at once by a second signal.
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
