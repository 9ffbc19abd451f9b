"""Commands that end actors (`aiodaft stop`), nodes (`aiodaft drain`) and whole clusters (`aiodaft down`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import click

from aiodaft._protocol.coordination.records import Member, check_name
from aiodaft._protocol.ids import node_of
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.diagnostics.process_view import is_answered
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, PeerLost
from aiodaft.program import run
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

from .options import Failed, Output, address_argument, completing, json_option, key_file_option, seconds

T = TypeVar("T")

PATIENCE: Final = 3.0


def address_of(given: str | None) -> str | None:
    return given or os.environ.get("AIODAFT_ADDRESS") or None


@asynccontextmanager
async def attached(address: str | None, key_file: str | None) -> AsyncGenerator[Runtime, None]:
    """A runtime that is attached to a cluster, for the time of the block.

    Raises:
        Failed: No address is known, the cluster cannot be reached, or the block has raised a DaftError or ValueError.
    """
    where = address_of(address)
    if where is None:
        raise Failed("say where a node of the cluster listens, such as tcp://10.0.0.1:7777")
    try:
        async with Runtime(where, key_file=key_file) as rt:
            yield rt
    except (DaftError, ValueError) as error:
        raise Failed(str(error)) from error


@completing
async def _names(context: click.Context) -> Iterable[str]:
    async with attached(None, None) as rt:
        return await rt.names()


@completing
async def _nodes(context: click.Context) -> Iterable[str]:
    async with attached(None, None) as rt:
        return [node.name for node in await rt.nodes()]


def _with_cluster(address: str | None, key_file: str | None, do: Callable[[Runtime], Awaitable[None]]) -> None:
    async def done() -> None:
        async with attached(address, key_file) as rt:
            await do(rt)

    run(done())


@click.command()
@click.argument("name", shell_complete=_names)
@address_argument
@key_file_option
@json_option
def stop(name: str, address: str | None, key_file: str | None, as_json: bool) -> None:
    """Stop an actor of a cluster by its name.

    It may have outlived its program.

    NAME: its name; `aiodaft ps` shows it. ADDRESS: the address of a node of the cluster; $AIODAFT_ADDRESS by default.
    """

    output = Output(as_json=as_json)

    async def stop_actor(rt: Runtime) -> None:
        # Services have names, too, and need not be of a class derived from Actor.
        named = await rt._controller.coordinator.lookup(check_name(name))
        await rt._actors.stop_handles([await rt._controller.found(named, object, rt._actors.errors)])
        output.document = {"name": name, "stopped": named.label}
        output.end()

    _with_cluster(address, key_file, stop_actor)


@click.command()
@click.argument("node", shell_complete=_nodes)
@address_argument
@key_file_option
@click.option(
    "--grace",
    type=seconds(),
    default=30.0,
    show_default=True,
    help="After that, the rest of the node's actors are ended.",
)
@json_option
def drain(node: str, address: str | None, key_file: str | None, grace: float, as_json: bool) -> None:
    """End a node when its actors have gone.

    They go to other nodes; this waits for that.

    NODE: its name. ADDRESS: the address of a node of the cluster; $AIODAFT_ADDRESS by default.
    """
    _with_cluster(address, key_file, partial(_drain, name=node, grace=grace, output=Output(as_json=as_json)))


@click.command()
@address_argument
@key_file_option
@json_option
def down(address: str | None, key_file: str | None, as_json: bool) -> None:
    """End all nodes of a cluster.

    ADDRESS: the address of a node of the cluster; $AIODAFT_ADDRESS by default.
    """
    logger = logging.getLogger("aiodaft")
    before = logger.level
    # The coordinator no longer answers because it was asked to end: that is no reason for a warning.
    logger.setLevel(logging.ERROR)
    try:
        _with_cluster(address, key_file, partial(_end, output=Output(as_json=as_json)))
    finally:
        logger.setLevel(before)


async def answer_of(question: Ref[T]) -> T | None:
    with suppress(DaftError):
        if await is_answered(question, PATIENCE):
            return await question
    return None


async def _drain(rt: Runtime, name: str, grace: float, output: Output) -> None:
    nodes = rt._controller.nodes
    if nodes.member(name) is None:
        there = ", ".join(member.name for member in nodes.members())
        raise ValueError(f"there is no node {name!r} in this cluster; there is {there}")
    agent = nodes.named(name)
    draining = agent.drain(grace)
    output.document = {"node": name, "waited_for": []}
    with suppress(OutcomeUnknown):
        left: tuple[str, ...] = ("",)
        while True:
            # When nothing is left, the node ends instead of an answer.
            before, left = left, await agent.left(left)
            for line in left:
                if line not in before:
                    output.document["waited_for"].append(line)
                    output.line(f"waits for {line}")
    await draining
    output.line(f"node {name} is drained")
    output.end()


async def _end(rt: Runtime, output: Output) -> None:
    controller = rt._controller
    first = node_of(controller.process.options.coordinator)
    members = controller.nodes.members()
    silent: list[str] = []
    ended: list[str] = []

    async def end(member: Member) -> None:
        try:
            await controller.nodes.named(member.name).end()
        except PeerLost as error:
            silent.append(f"the node {member.name} was not told to end: {error}")
            return
        except ActorDied:
            pass
        ended.append(member.name)

    async def end_lost(member: Member) -> None:
        far = controller.connections.far
        assert far is not None
        try:
            found = await who_listens(far.network, controller.process.id, member.address)
        except DaftError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError):
                silent.append(f"the node {member.name}, which had lost its lease, was not told to end: {error}")
        else:
            if found.node == member.peer:
                controller.nodes.add(member)
                await end(member)

    lost = await answer_of(controller.coordinator.lost_members()) or ()
    await asyncio.gather(*(end(member) for member in members if member.name != first), *map(end_lost, lost))
    await asyncio.gather(*(end(member) for member in members if member.name == first))
    if silent:
        raise PeerLost("; ".join(silent))
    output.document = {"ended": sorted(ended)}
    output.end()
