"""`aiodaft ps`, `aiodaft stop`, `aiodaft drain` and `aiodaft down`: what a cluster has, and how that ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from aiodaft._protocol.coordination.records import Member, check_name
from aiodaft._protocol.ids import is_node, node_of
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.diagnostics.process_stack import is_answered
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, PeerLost
from aiodaft.naming import found
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

T = TypeVar("T")

# Seconds that a node has for an answer.
_PATIENCE: Final = 3.0


def add_address(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that use a cluster."""
    parser.add_argument("address", nargs="?", help="where a node of the cluster listens; default: $AIODAFT_ADDRESS")
    parser.add_argument("--key-file", help="the key of the cluster; default: $AIODAFT_KEY_FILE, ~/.config/aiodaft/key")


async def show_processes(arguments: argparse.Namespace) -> int:
    """Print the nodes, and the actors in their processes; returns the exit status."""
    return await _with_cluster(arguments, _show)


async def stop_actor(arguments: argparse.Namespace) -> int:
    """Stop the actor with a name; returns the exit status."""

    async def stop(rt: Runtime) -> None:
        # Services have names, too, and need not be of a class derived from Actor.
        named = await rt._controller.coordinator.lookup(check_name(arguments.name))
        await rt.stop(await found(rt._controller, named, object, rt))

    return await _with_cluster(arguments, stop)


async def end_cluster(arguments: argparse.Namespace) -> int:
    """End all nodes with their workers; returns the exit status."""
    return await _with_cluster(arguments, _end)


async def drain_node(arguments: argparse.Namespace) -> int:
    """Drain one node, and wait until it has ended; returns the exit status."""
    return await _with_cluster(arguments, partial(_drain, name=arguments.node, grace=arguments.grace))


async def _with_cluster(arguments: argparse.Namespace, do: Callable[[Runtime], Awaitable[None]]) -> int:
    try:
        address = arguments.address or os.environ.get("AIODAFT_ADDRESS")
        if not address:
            raise ValueError("say where a node of the cluster listens, such as tcp://10.0.0.1:7777")
        async with Runtime(address, key_file=arguments.key_file) as rt:
            await do(rt)
    except (DaftError, ValueError) as error:
        sys.stderr.write(f"aiodaft: {error}\n")
        return 1
    return 0


async def _show(rt: Runtime) -> None:
    coordinator, nodes = rt._controller.coordinator, rt._controller.nodes
    listed, named = await asyncio.gather(_answer(coordinator.members()), _answer(coordinator.names("")))
    names: dict[str, list[str]] = {}
    for one in named or ():
        names.setdefault(one.peer, []).append(one.name)
    # The coordinator knows what is free there.
    members = nodes.members() if listed is None else list(listed)
    # A node that is silent holds up only what is said of it.
    for member, said in zip(
        members, await asyncio.gather(*(_said(rt, member, names) for member in members)), strict=True
    ):
        print(_line(member), *said, sep="\n    ")
    if listed is None or named is None:
        raise PeerLost("the coordinator does not answer: names, and what is free, may be missing")


async def _said(rt: Runtime, member: Member, names: Mapping[str, Sequence[str]]) -> list[str]:
    """What a node says of itself and its processes."""
    agent = rt._controller.nodes.named(member.name)
    state, processes = await asyncio.gather(_answer(agent.state()), _answer(agent.processes()))
    if state is None or processes is None:
        return ["does not answer"]
    said = ["is being drained"] * state.draining
    for process in processes:
        actors = ", ".join(process.actors) or "no actors"
        named_as = f", named {', '.join(names[process.id])}" if process.id in names else ""
        owner = "the cluster" if is_node(process.owner) else process.owner
        said.append(f"pid {process.pid}: {actors}{named_as} (of {owner})")
    return said


async def _answer(question: Ref[T]) -> T | None:
    """The answer of a node; None if there is none."""
    with suppress(DaftError):
        if await is_answered(question, _PATIENCE):
            return await question
    return None


def _line(member: Member) -> str:
    amounts = [f"{member.free.get(name, 0):g}/{total:g} {name}" for name, total in member.totals.items() if total]
    labels = [f"{name}={value}" for name, value in member.labels.items()]
    return "  ".join([member.name, member.address, f"free: {', '.join(amounts) or 'nothing'}", *labels])


async def _drain(rt: Runtime, name: str, grace: float) -> None:
    nodes = rt._controller.nodes
    if nodes.member(name) is None:
        there = ", ".join(member.name for member in nodes.members())
        raise ValueError(f"there is no node {name!r} in this cluster; there is {there}")
    agent = nodes.named(name)
    draining = agent.drain(grace)
    with suppress(OutcomeUnknown):
        left: tuple[str, ...] = ("",)
        while True:
            # When nothing is left, the node ends instead of an answer.
            before, left = left, await agent.left(left)
            for line in left:
                if line not in before:
                    print(f"waits for {line}", flush=True)
    await draining
    print(f"node {name} is drained", flush=True)


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
