"""`aiodaft ps`, `aiodaft stop`, `aiodaft drain` and `aiodaft down`: what a cluster has, and how that ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import click

from aiodaft._protocol.coordination.records import Member, check_name
from aiodaft._protocol.ids import is_node, node_of
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.diagnostics.process_stack import is_answered
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, PeerLost
from aiodaft.naming import found
from aiodaft.program import run
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

from .options import address_argument, key_file_option, seconds
from .output import Failed, Output, json_option

T = TypeVar("T")

# Seconds that a node has for an answer.
_PATIENCE: Final = 3.0


def _with_cluster(address: str | None, key_file: str | None, do: Callable[[Runtime], Awaitable[None]]) -> None:
    """Do something with a runtime that is attached to a cluster."""
    where = address or os.environ.get("AIODAFT_ADDRESS")
    if not where:
        raise Failed("say where a node of the cluster listens, such as tcp://10.0.0.1:7777")

    async def attached() -> None:
        try:
            async with Runtime(where, key_file=key_file) as rt:
                await do(rt)
        except (DaftError, ValueError) as error:
            raise Failed(str(error)) from error

    run(attached())


@click.command()
@address_argument
@key_file_option
@json_option
def ps(address: str | None, key_file: str | None, as_json: bool) -> None:
    """Show the nodes of a cluster, and their actors.

    ADDRESS: where a node of the cluster listens; $AIODAFT_ADDRESS by default.
    """
    _with_cluster(address, key_file, lambda rt: _show(rt, Output(as_json=as_json)))


@click.command()
@click.argument("name")
@address_argument
@key_file_option
def stop(name: str, address: str | None, key_file: str | None) -> None:
    """Stop an actor of a cluster by its name.

    It may have outlived its program.

    NAME: its name; `aiodaft ps` shows it. ADDRESS: where a node of the cluster listens; $AIODAFT_ADDRESS by default.
    """

    async def stop_actor(rt: Runtime) -> None:
        # Services have names, too, and need not be of a class derived from Actor.
        named = await rt._controller.coordinator.lookup(check_name(name))
        await rt.stop(await found(rt._controller, named, object, rt._owned.errors))

    _with_cluster(address, key_file, stop_actor)


@click.command()
@click.argument("node")
@address_argument
@key_file_option
@click.option(
    "--grace",
    type=seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="After that, what is left on the node is ended.",
)
@json_option
def drain(node: str, address: str | None, key_file: str | None, grace: float, as_json: bool) -> None:
    """End a node when its actors have gone.

    They go to other nodes; this waits for that.

    NODE: its name. ADDRESS: where a node of the cluster listens; $AIODAFT_ADDRESS by default.
    """
    _with_cluster(address, key_file, partial(_drain, name=node, grace=grace, output=Output(as_json=as_json)))


@click.command()
@address_argument
@key_file_option
def down(address: str | None, key_file: str | None) -> None:
    """End all nodes of a cluster.

    ADDRESS: where a node of the cluster listens; $AIODAFT_ADDRESS by default.
    """
    _with_cluster(address, key_file, _end)


async def _show(rt: Runtime, output: Output) -> None:
    coordinator, nodes = rt._controller.coordinator, rt._controller.nodes
    listed, named = await asyncio.gather(_answer(coordinator.members()), _answer(coordinator.names("")))
    names: dict[str, list[str]] = {}
    for one in named or ():
        names.setdefault(one.peer, []).append(one.name)
    # The coordinator knows what is free there.
    members = nodes.members() if listed is None else list(listed)
    # A node that is silent holds up only what is said of it.
    shown = await asyncio.gather(*(_look_at(rt, member, names) for member in members))
    output.document = {"nodes": shown}
    for node in shown:
        output.line("\n    ".join([_line(node), *_said(node)]))
    output.end()
    if listed is None or named is None:
        raise PeerLost("the coordinator does not answer: names, and what is free, may be missing")


async def _look_at(rt: Runtime, member: Member, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A node, and what it says of itself and its processes."""
    agent = rt._controller.nodes.named(member.name)
    state, processes = await asyncio.gather(_answer(agent.state()), _answer(agent.processes()))
    return {
        "name": member.name,
        "address": member.address,
        "state": "silent" if state is None or processes is None else "draining" if state.draining else "ready",
        "labels": dict(member.labels),
        "total": dict(member.totals),
        "free": dict(member.free),
        "processes": [
            {
                "pid": process.pid,
                "actors": list(process.actors),
                "names": list(names.get(process.id, ())),
                "owner": "the cluster" if is_node(process.owner) else process.owner,
            }
            for process in processes or ()
        ],
    }


async def _answer(question: Ref[T]) -> T | None:
    """The answer of a node; None if there is none."""
    with suppress(DaftError):
        if await is_answered(question, _PATIENCE):
            return await question
    return None


def _line(node: Mapping[str, Any]) -> str:
    amounts = [f"{node['free'].get(name, 0):g}/{total:g} {name}" for name, total in node["total"].items() if total]
    labels = [f"{name}={value}" for name, value in node["labels"].items()]
    return "  ".join([node["name"], node["address"], f"free: {', '.join(amounts) or 'nothing'}", *labels])


def _said(node: Mapping[str, Any]) -> Iterator[str]:
    if node["state"] == "silent":
        yield "does not answer"
        return
    if node["state"] == "draining":
        yield "is being drained"
    for process in node["processes"]:
        actors = ", ".join(process["actors"]) or "no actors"
        named_as = f", named {', '.join(process['names'])}" if process["names"] else ""
        yield f"pid {process['pid']}: {actors}{named_as} (of {process['owner']})"


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


async def _end(rt: Runtime) -> None:
    controller = rt._controller
    first = node_of(controller.process.options.coordinator)
    members = controller.nodes.members()
    silent: list[str] = []

    async def end(member: Member) -> None:
        # One that is gone has ended.
        with suppress(ActorDied):
            try:
                await controller.nodes.named(member.name).end()
            except PeerLost as error:
                silent.append(f"the node {member.name} was not told to end: {error}")

    async def end_lost(member: Member) -> None:
        far = controller.connections.far
        assert far is not None
        try:
            found = await who_listens(far.network, controller.process.id, member.address)
        except DaftError as error:
            # Where nothing listens, it has ended.
            if not isinstance(error.__cause__, ConnectionRefusedError):
                silent.append(f"the node {member.name}, which had lost its lease, was not told to end: {error}")
        else:
            if found.node == member.peer:
                controller.nodes.add(member)
                await end(member)

    lost = await _answer(controller.coordinator.lost_members()) or ()
    # The coordinator is the last one, so that the others can leave.
    await asyncio.gather(*(end(member) for member in members if member.name != first), *map(end_lost, lost))
    await asyncio.gather(*(end(member) for member in members if member.name == first))
    if silent:
        raise PeerLost("; ".join(silent))
