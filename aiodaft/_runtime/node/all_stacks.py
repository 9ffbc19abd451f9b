"""The stacks of all processes of a runtime."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiodaft._runtime.diagnostics.process_stack import is_answered, stack_here
from aiodaft.exceptions import DaftError
from aiodaft.stack import ProcessStack, RuntimeStack

if TYPE_CHECKING:
    from aiodaft._runtime.node.node_agent import NodeAgent
    from aiodaft._runtime.node.worker_table import WorkerProcess
    from aiodaft._runtime.peer import Peer


async def stack_of_all(peer: Peer, node: NodeAgent, patience: float) -> RuntimeStack:
    """Ask every process of this node, and of those that do not answer in time ask the kernel."""
    processes = await node.processes()
    others = await asyncio.gather(*(_stack_of(peer, node, process, patience) for process in processes))
    return RuntimeStack((stack_here(peer), *(found for found in others if found is not None)))


async def _stack_of(peer: Peer, node: NodeAgent, process: WorkerProcess, patience: float) -> ProcessStack | None:
    asked_at = peer.process.env.monotonic()
    asked = peer.agent_of(process.id).stack()
    if not await is_answered(asked, patience):
        dump = await node.dump(process.id)
        return ProcessStack(process.id, process.pid, process.actors, peer.process.env.monotonic() - asked_at, dump=dump)
    try:
        return await asked
    except DaftError:
        # It has ended.
        return None
