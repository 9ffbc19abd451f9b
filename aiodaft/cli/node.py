"""`aiodaft up` and `aiodaft join`: serve this machine as a node of a cluster, until the process is told to end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from aiodaft._protocol.connections.address import Address
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.identity import Identity, load_identity, receive_identity
from aiodaft._runtime.connections.network import TcpNetwork
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.coordination.state import store_at
from aiodaft._runtime.node.local_node import Machine
from aiodaft._runtime.node.node_agent import NodeOptions
from aiodaft._runtime.node.node_process import NodeProcess, NodeProcessOptions
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.interfaces import interface_to
from aiodaft._runtime.process import MSGPACK, ProcessOptions
from aiodaft.exceptions import DaftError
from aiodaft.runtime import has_uvloop
from aiodaft_transport import TransportError, default_name

_NOBODY = PeerId("")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that both commands have."""
    parser.add_argument(
        "--listen",
        help="where to listen, such as tcp://10.0.0.1:7777, never all interfaces; or ssh: any port of the address that "
        "the ssh connection of this command came to",
    )
    parser.add_argument("--name", help="the name of this node; default: that of the machine")
    help_ = "drain the node at SIGTERM, for so long at most; a second SIGTERM ends it at once"
    parser.add_argument("--drain", type=parse_seconds, metavar="SECONDS", help=help_)
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--key-file", help="the key of the cluster; default: $AIODAFT_KEY_FILE, ~/.config/aiodaft/key")
    key.add_argument(
        "--key-stdin",
        action="store_true",
        help="read the key from standard input, a pipe that stays open; the node ends when the pipe ends",
    )
    add_offers(parser)


def parse_lease(text: str) -> float:
    """The seconds of a lease.

    Raises:
        ArgumentTypeError: A node could not keep such a lease.
    """
    return parse_seconds(text, 1)


def parse_seconds(text: str, least: float = 0) -> float:
    """A number of seconds.

    Raises:
        ArgumentTypeError: It is none, or less than `least`.
    """
    with suppress(ValueError):
        if (seconds := float(text)) >= least and math.isfinite(seconds):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {least:g}")


def add_offers(parser: argparse.ArgumentParser) -> None:
    """What a node offers."""
    parser.add_argument("--cpus", type=float, help="CPUs to offer; default: all that this process may use")
    parser.add_argument("--gpus", type=int, help="GPUs to offer; default: all that this process may use")
    parser.add_argument("--resource", action="append", default=[], metavar="NAME=AMOUNT", help="another resource")
    parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="what placement may ask for")
    parser.add_argument("--share-gpus", action="store_true", help="other runtimes may use the same GPUs")


async def serve(arguments: argparse.Namespace) -> int:
    """Run a node until SIGTERM, SIGINT, `aiodaft down` or the end of `--key-stdin`; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    join: str | None = getattr(arguments, "address", None)
    try:
        identity = receive_identity(sys.stdin.buffer) if arguments.key_stdin else load_identity(arguments.key_file)
        listen = _where_to_listen(arguments.listen, join)
        node = make_node(arguments, join, listen, identity, _coordinator(arguments))
        if arguments.key_stdin:
            _end_with(sys.stdin.fileno(), node)
        address = await node.open()
    except (DaftError, TransportError, OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"aiodaft: {error}\n")
        return 1
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.end)
    if arguments.drain is not None:

        def drain() -> None:
            loop.add_signal_handler(signal.SIGTERM, node.end)
            node.drain(arguments.drain)

        loop.add_signal_handler(signal.SIGTERM, drain)
    # Who started this reads where it listens.
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    await node.run()
    await node.aclose()
    if node.problem is not None:
        sys.stderr.write(f"aiodaft: this node ends, because {node.problem}\n")
        return 1
    return 0


def _end_with(pipe: int, node: NodeProcess) -> None:
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(pipe)
        node.end()

    # Nothing comes behind the key, so that only the end of the pipe can be read.
    loop.add_reader(pipe, ended)


def make_node(
    arguments: argparse.Namespace, join: str | None, listen: str, identity: Identity, coordinator: Coordinator
) -> NodeProcess:
    """A node that offers what `add_offers` says; `coordinator` is of use only to the first one."""
    env = Env()
    machine = Machine(
        env,
        arguments.cpus,
        arguments.gpus,
        {name: _amount(name, text) for name, text in _pairs(arguments.resource)},
        share_gpus=arguments.share_gpus,
    )
    options = NodeProcessOptions(
        name=arguments.name or env.hostname(),
        listen=listen,
        join=join,
        network=TcpNetwork(identity),
        labels=dict(_pairs(arguments.label)),
        process=ProcessOptions(
            _NOBODY,
            env.hostname(),
            "",
            _NOBODY,
            _NOBODY,
            _NOBODY,
            default_name(),
            True,
            2.0,
            1_000_000,
            MSGPACK,
        ),
        node=NodeOptions(sys.platform == "linux", None, (), has_uvloop()),
    )
    return NodeProcess(options, machine, coordinator, env)


def _coordinator(arguments: argparse.Namespace) -> Coordinator:
    """The coordinator, which a node that joins another one does not use."""
    if arguments.command == "join":
        return Coordinator()
    if arguments.state is not None:
        return Coordinator(store_at(arguments.state), lease=arguments.lease)
    return Coordinator(stored=new_term(forgot=arguments.recover), lease=arguments.lease)


def new_term(*, forgot: bool = False) -> Stored:
    """What a coordinator without a store begins with: its term is greater than that of any before it."""
    return Stored(term=int(time.time()), forgot=forgot)


def _pairs(given: Sequence[str]) -> list[tuple[str, str]]:
    for entry in given:
        if "=" not in entry or not entry.partition("=")[0].strip():
            raise ValueError(f"{entry!r} is not NAME=VALUE")
    return [(name, value) for name, _, value in (entry.partition("=") for entry in given)]


def _amount(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--resource {name}={text}: {text!r} is not a number") from None


def _where_to_listen(given: str | None, join: str | None) -> str:
    if given == "ssh":
        # Client, its port, server, its port.
        parts = os.environ.get("SSH_CONNECTION", "").split()
        if len(parts) != 4:
            raise ValueError("--listen ssh: this command was not started by ssh ($SSH_CONNECTION is not set)")
        return str(Address(parts[2], 0))
    return given or ("tcp://127.0.0.1:7777" if join is None else str(Address(interface_to(join), 0)))
