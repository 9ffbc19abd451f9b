"""A live notebook: a kernel of its own, run cell by cell."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from leaks import descendants


@dataclass
class Output:
    """What a cell gave."""

    printed: str = ""
    result: str | None = None
    error: str | None = None
    traceback: list[str] = field(default_factory=list)


class Notebook:
    """Runs cells in a kernel."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self.manager = manager
        self._client = client
        # By whichever cell, and by what goes on between cells.
        self.printed = ""

    async def run(self, cell: str, *, interrupt_at: str | None = None) -> Output:
        """Run a cell to its end; interrupt it once it has printed that."""
        message_id = self._client.execute(cell)
        output = Output()
        while True:
            message = await self._client.get_iopub_msg()
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "stream":
                self.printed += content["text"]
            if message["parent_header"].get("msg_id") != message_id:
                continue
            match message["msg_type"]:
                case "stream":
                    output.printed += content["text"]
                    if interrupt_at is not None and interrupt_at in output.printed:
                        interrupt_at = None
                        await self.manager.interrupt_kernel()
                        # An awaiting cell hears of it when the kernel's loop wakes up next (ipykernel issue 881).
                        self._client.kernel_info()
                case "execute_result":
                    output.result = content["data"]["text/plain"]
                case "error":
                    output.error, output.traceback = f"{content['ename']}: {content['evalue']}", content["traceback"]
                case "status" if content["execution_state"] == "idle":
                    return output

    async def restart(self, *, now: bool = False) -> None:
        """Restart the kernel: in order, or by SIGKILL."""
        await self.manager.restart_kernel(now=now)
        await self._client.wait_for_ready()

    def processes(self) -> set[int]:
        """Every process that the kernel has started."""
        return descendants(self.kernel_pid)

    @property
    def kernel_pid(self) -> int:
        pid = getattr(self.manager.provisioner, "pid", None)
        assert isinstance(pid, int)
        return pid


@asynccontextmanager
async def open_notebook(setup: str) -> AsyncGenerator[Notebook, None]:
    """A kernel with files of its own, after a first cell."""
    context = zmq.asyncio.Context()
    # Paths of unix sockets are short.
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JUPYTER_RUNTIME_DIR": folder, "IPYTHONDIR": folder, "JUPYTER_PLATFORM_DIRS": "1"}
        manager = AsyncKernelManager(context=context, transport="ipc", connection_file=f"{folder}/kernel.json")
        await manager.start_kernel(env=environment)
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready()
            notebook = Notebook(manager, client)
            first = await notebook.run(setup)
            assert first.error is None, first.traceback
            yield notebook
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)
            context.destroy(linger=0)
