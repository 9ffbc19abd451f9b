"""The stacks of all processes of a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.agent import Agent
from aiodaft._runtime.diagnostics.process_stack import is_answered, stack_here
from aiodaft._runtime.diagnostics.wait_graph import WaitGraph
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.worker_table import WorkerProcess
from aiodaft.exceptions import DaftError
from aiodaft.stack import ProcessStack, RuntimeStack


async def stack_of_all(
    waits: WaitGraph, node: NodeAgent, agent_of: Callable[[PeerId], Agent], patience: float
) -> RuntimeStack:
    """Ask every process of this node for its stack; if a process does not answer, ask the kernel."""

    async def ask(process: WorkerProcess) -> ProcessStack | None:
        asked_at = now()
        asked = agent_of(process.id).stack()
        if not await is_answered(asked, patience):
            dump = await node.dump(process.id)
            return ProcessStack(process.id, process.pid, process.actors, now() - asked_at, dump=dump)
        try:
            return await asked
        except DaftError:
            # The process has ended.
            return None

    now = waits.process.env.monotonic
    others = await asyncio.gather(*map(ask, await node.processes()))
    return RuntimeStack((stack_here(waits), *(found for found in others if found is not None)))
