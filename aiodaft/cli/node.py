"""`aiodaft up` and `aiodaft join`: serve this machine as a node of a cluster, until the process is told to end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple

import click

from aiodaft._protocol.connections.address import Address
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.dialing import TcpNetwork
from aiodaft._runtime.connections.identity import Identity, load_identity, receive_identity
from aiodaft._runtime.coordination.coordinator import LEASE, Coordinator
from aiodaft._runtime.coordination.sqlite_store import store_at
from aiodaft._runtime.node.node_process import NodeProcess, NodeProcessOptions
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.platform.capabilities import has_fork_server
from aiodaft._runtime.platform.linux import interface_to
from aiodaft._runtime.process import MSGPACK, Env, ProcessOptions
from aiodaft.exceptions import DaftError
from aiodaft.program import run
from aiodaft.runtime import has_uvloop
from aiodaft_transport import TransportError, default_name

from .options import Failed, json_option, key_file_option, seconds

# The width of the random part of a coordinator's number, below the milliseconds of its beginning.
_LOT_BITS: Final = 22

_NOBODY = PeerId("")


class Offers(NamedTuple):
    cpus: float | None
    gpus: int | None
    resource: Sequence[str]
    label: Sequence[str]
    share_gpus: bool


class Serving(NamedTuple):
    listen: str | None
    name: str | None
    drain: float | None
    key_file: str | None
    key_stdin: bool
    as_json: bool
    offers: Offers


def offers_options(command: Callable[..., Any]) -> Callable[..., Any]:
    @click.option("--cpus", type=float, help="CPUs to offer.  [default: all that this process may use]")
    @click.option("--gpus", type=int, help="GPUs to offer.  [default: all that this process may use]")
    @click.option("--resource", multiple=True, metavar="NAME=AMOUNT", help="Another resource.")
    @click.option("--label", multiple=True, metavar="NAME=VALUE", help="A label that placement may ask for.")
    @click.option("--share-gpus", is_flag=True, help="Other runtimes may use the same GPUs.")
    @wraps(command)
    def with_offers(**given: Any) -> Any:
        return command(offers=Offers(*map(given.pop, Offers._fields)), **given)

    return with_offers


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    @click.option(
        "--listen",
        help="The address to listen at, such as tcp://10.0.0.1:7777, never all interfaces; or ssh: any port of the "
        "address that the ssh connection of this command came to.",
    )
    @click.option("--name", help="The name of this node.  [default: that of the machine]")
    @click.option(
        "--drain",
        type=seconds(),
        help="Drain the node at SIGTERM, for so long at most; a second SIGTERM ends it at once.",
    )
    @key_file_option
    @click.option(
        "--key-stdin",
        is_flag=True,
        help="Read the key from standard input, a pipe that stays open; the node ends when the pipe ends.",
    )
    @json_option
    @offers_options
    @wraps(command)
    def with_serving(**given: Any) -> Any:
        serving = Serving(*map(given.pop, Serving._fields))
        if serving.key_file is not None and serving.key_stdin:
            raise click.UsageError("--key-file and --key-stdin exclude each other")
        return command(serving=serving, **given)

    return with_serving


@click.command()
@click.option(
    "--lease",
    type=seconds(1),
    default=LEASE,
    show_default=True,
    help="Seconds that a silent node stays in the cluster.",
)
@click.option(
    "--state",
    metavar="STATE",
    help="Keep names and nodes in this file, or in etcd://HOST:PORT[,HOST:PORT...][/PREFIX].  [default: in memory]",
)
@click.option(
    "--recover",
    is_flag=True,
    help="Without --state: wait until the nodes of a coordinator that was here before say what names they hold.",
)
@serving_options
def up(lease: float, state: str | None, recover: bool, serving: Serving) -> int:
    """Serve this machine as the first node of a cluster.

    It ends at SIGTERM, SIGINT, `aiodaft down`, or the end of --key-stdin.
    """

    def coordinator() -> Coordinator:
        if state is not None:
            return Coordinator(store_at(state), lease=lease)
        return Coordinator(stored=new_term(forgot=recover), lease=lease)

    return run(_serve(serving, None, coordinator))


@click.command()
@click.argument("address")
@serving_options
def join(address: str, serving: Serving) -> int:
    """Serve this machine as another node of a cluster.

    ADDRESS: the address of another node of the cluster, such as tcp://10.0.0.1:7777.
    """
    return run(_serve(serving, address, Coordinator))


async def _serve(serving: Serving, join: str | None, coordinator: Callable[[], Coordinator]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        identity = receive_identity(sys.stdin.buffer) if serving.key_stdin else load_identity(serving.key_file)
        listen = _where_to_listen(serving.listen, join)
        node = make_node(serving.name, join, listen, serving.offers, identity, coordinator())
        if serving.key_stdin:
            _end_with(sys.stdin.fileno(), node)
        address = await node.open()
    except (DaftError, TransportError, OSError, ValueError, ImportError) as error:
        nameless = join is not None and isinstance(error, OSError) and not error.filename and join not in str(error)
        raise Failed(f"{join} cannot be joined: {error}" if nameless else str(error)) from error
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.end)
    if serving.drain is not None:
        grace = serving.drain

        def drain() -> None:
            loop.add_signal_handler(signal.SIGTERM, node.end)
            node.drain(grace)

        loop.add_signal_handler(signal.SIGTERM, drain)
    # The program that started this reads where it listens: one line.
    where = {"address": address, "node": node.name, "pid": os.getpid(), "cluster": identity.key.cluster.hex()[:12]}
    click.echo(json.dumps(where) if serving.as_json else address)
    await node.run()
    await node.aclose()
    if node.problem is not None:
        raise Failed(f"this node ends, because {node.problem}")
    return 0


def _end_with(pipe: int, node: NodeProcess) -> None:
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(pipe)
        node.end()

    # Nothing comes behind the key, so that only the end of the pipe can be read.
    loop.add_reader(pipe, ended)


def make_node(
    name: str | None, join: str | None, listen: str, offers: Offers, identity: Identity, coordinator: Coordinator
) -> NodeProcess:
    """A node; `coordinator` is of use only to the first one."""
    env = Env()
    machine = Machine(
        env,
        offers.cpus,
        offers.gpus,
        {name: _amount(name, text) for name, text in _pairs(offers.resource)},
        share_gpus=offers.share_gpus,
    )
    options = NodeProcessOptions(
        name=name or env.hostname(),
        listen=listen,
        join=join,
        network=TcpNetwork(identity),
        labels=dict(_pairs(offers.label)),
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
        node=NodeOptions(has_fork_server(), None, has_uvloop()),
    )
    return NodeProcess(options, machine, coordinator, env)


def new_term(*, forgot: bool = False) -> Stored:
    """The first state of a coordinator without a store: no other one has its epochs, and no earlier one greater ones.

    Two may begin in one second, or know of no other time: milliseconds keep their order, and a lot tells them apart.
    """
    seconds, rest = divmod(time.time_ns(), 10**9)
    lot = int.from_bytes(os.urandom(4)) % (1 << _LOT_BITS)
    return Stored(term=seconds, forgot=forgot, lot=(rest // 10**6 << _LOT_BITS) + lot)


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
