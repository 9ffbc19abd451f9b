"""A live notebook: a kernel of its own, run cell by cell."""

from __future__ import annotations

import ast
import os
import re
import tempfile
import textwrap
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from leaks import descendants, wait_gone

# The cell that a notebook begins with.
SETUP: Final = f"""
import asyncio, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import aiodaft
"""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Output:
    """The output of a cell."""

    printed: str = ""
    result: str | None = None
    html: str | None = None
    error: str | None = None
    # As a terminal shows it, without colours.
    traceback: str = ""
    # The time of an action in answer to its output; on the clock that all processes share.
    acted_at: float = 0.0


class Notebook:
    """Runs cells in a kernel."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self.manager = manager
        self._client = client
        # By any cell, and by code that goes on between cells.
        self.printed = ""

    async def interrupt(self) -> None:
        """Interrupt the cell that runs."""
        await self.manager.interrupt_kernel()

    async def run(self, cell: str, *, when: str = "", then: Callable[[], Awaitable[object]] | None = None) -> Output:
        """Run a cell to its end; do something once it has printed that."""
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
                    if then is not None and when in output.printed:
                        act, then, output.acted_at = then, None, time.monotonic()
                        await act()
                case "execute_result":
                    output.result, output.html = content["data"]["text/plain"], content["data"].get("text/html")
                case "error":
                    output.error = f"{content['ename']}: {content['evalue']}"
                    output.traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    return output

    async def complete(self, code: str) -> list[str]:
        """The completions that Tab offers at the end of this code."""
        return list((await self._answer(self._client.complete(code, len(code))))["matches"])

    async def look_up(self, code: str, *, source: bool = False) -> str:
        """The help that Shift-Tab or `?` shows at the end of this code, or that of `??`."""
        answer = await self._answer(self._client.inspect(code, len(code), detail_level=int(source)))
        return _COLOUR.sub("", answer["data"]["text/plain"])

    async def _answer(self, message_id: str) -> dict[str, Any]:
        while (message := await self._client.get_shell_msg())["parent_header"].get("msg_id") != message_id:
            pass
        content: dict[str, Any] = message["content"]
        return content

    async def value(self, cell: str) -> object:
        """The value of the last expression of a cell."""
        output = await self.run(textwrap.dedent(cell))
        assert output.error is None, output.traceback
        return None if output.result is None else ast.literal_eval(output.result)

    async def stop(self) -> None:
        """Close the runtime, and wait for the end of its processes, however slow this machine is."""
        pids = self.processes()
        await self.value("await aiodaft.stop()")
        assert wait_gone(pids) == set()

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
async def open_notebook(setup: str = SETUP) -> AsyncGenerator[Notebook, None]:
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
            await notebook.value(setup)
            yield notebook
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)
            context.destroy(linger=0)
