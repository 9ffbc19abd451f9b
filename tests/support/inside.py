"""The parts of a runtime that its users do not see. Tests reach them through this file alone."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import aiodaft
from aiodaft import overview
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.value import Key
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.controller import Controller
from aiodaft._runtime.groups import process_group
from aiodaft._runtime.groups.inboxes import Box, Inboxes
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.node_process import NodeProcess
from aiodaft._runtime.node.nodes import LocalNode
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Timeouts, _open, current_process
from aiodaft._runtime.scope_actors import ScopeActors

T = TypeVar("T")


def open_runtimes() -> set[PeerId]:
    """The processes that runtimes have opened here, and not closed."""
    return {process.id for process in _open}


def controller_of(rt: aiodaft.Runtime) -> Controller:
    return rt._opened


def agent_of(rt: aiodaft.Runtime) -> NodeAgent:
    """The node agent of the machine."""
    return rt._controller.nodes.of(rt._controller.process.id)


def known_nodes_of(node: NodeProcess) -> int:
    """The number of nodes that a node knows."""
    return len(node._nodes.members())


def peer_of(rt: aiodaft.Runtime) -> Peer:
    """The parts of the process that has opened the runtime."""
    return rt._controller.peer


def launcher_of(rt: aiodaft.Runtime) -> WorkerLauncher:
    """The launcher of this machine's workers."""
    site = rt._opened.site
    assert isinstance(site, LocalNode)
    assert isinstance(site.launcher, WorkerLauncher)
    return site.launcher


def fork_server_of(rt: aiodaft.Runtime) -> int:
    """The pid of the fork server, which has started."""
    pid = launcher_of(rt).pid
    assert pid is not None
    return pid


async def resources_of(rt: aiodaft.Runtime) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The resources of the node of this process, and how much of each is free."""
    here = rt._controller.nodes.name_of(rt._controller.process.id)
    [node] = [node for node in await rt.nodes(patience=30) if node.name == here]
    return node.total, node.free


def timeouts_of(rt: aiodaft.Runtime) -> Timeouts:
    """The controller's timeouts; tests change them while the runtime is open."""
    return rt._controller.process.env.timeouts


def actors_of(rt: aiodaft.Runtime) -> ScopeActors:
    """The actors that the runtime stops at its end."""
    return rt._actors


async def up_again(rt: aiodaft.Runtime, actor: aiodaft.Actor) -> None:
    """Wait until a supervised actor is up; raises ActorDied if it is gone."""
    target = rt._actors.target(actor)
    assert isinstance(target, FollowingTarget)
    await rt._controller.directory.address(target.number)


def errors_kept_by(rt: aiodaft.Runtime) -> Sized:
    """The errors that the runtime raises at its end."""
    return rt._actors.errors.kept


def failed_refs_of(rt: aiodaft.Runtime) -> Collection[object]:
    """The refs with errors that no code has looked at yet."""
    return rt._actors.errors.held


async def awaited(spawned: Awaitable[T]) -> T:
    """The result of a spawn, as a coroutine for a task of its own."""
    return await spawned


def producer_of(ref: aiodaft.Ref[object]) -> str:
    """The process that makes or has made the value of a ref."""
    return state_of(ref).producer


def members_watched_here() -> int:
    """The number of members in this process that are watched by those that receive from them."""
    return len(current_process().part(Inboxes)._ends)


def inboxes_here() -> list[Box]:
    """The inboxes of the members in this process."""
    return list(current_process().part(Inboxes)._boxes.values())


def miss_the_members() -> None:
    """In a method of a member: as if the message with the members of its group had been lost."""
    standing = aiodaft.current_group()._standing
    standing.roster = replace(standing.roster, since=-1)


def traffic_here() -> aiodaft.state.Traffic:
    """The traffic of this process."""
    return current_process().part(Peer).connections.traffic()


def questions_from_now() -> list[Key]:
    """The values that this process asks others for from now on: the list grows with each question."""
    questions, asked = current_process().part(Peer).transfer.questions, list[Key]()
    ask = questions.ask

    def note(remote: PeerId, key: Key, waiter: Any) -> None:
        asked.append(key)
        ask(remote, key, waiter)

    questions.ask = note  # type: ignore[method-assign]  # as good as the method
    return asked


def end_blocks_that_stand_still(looks: int) -> None:
    """In an actor: how often a block of torch may be found at one place after a member is lost."""
    process_group._LOOKS = looks


def connect_to_stores_within(seconds: float) -> None:
    """In an actor: the seconds of the first attempt to connect to the store of a block."""
    process_group._CONNECT_WITHIN = seconds


def break_connection(rt: aiodaft.Runtime, remote: str) -> None:
    """Reset the connection of the process that has opened the runtime and another one."""
    rt._controller.peer.connections[PeerId(remote)].close(ConnectionResetError("reset by a test"))


# The questions of `rt.info`: to the node of an actor for its process, and to that process.
process_asked_for, report_asked_for = overview._process, overview._report
