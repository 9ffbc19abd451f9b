"""Web servers, started as users start them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

_SUPPORT: Final = Path(__file__).parent

# Each with its log line when it serves.
COMMANDS: Final = {
    "uvicorn": (["uvicorn", "--loop=uvloop", "--uds={socket}", "{app}"], "Uvicorn running on"),
    "uvicorn on asyncio": (["uvicorn", "--loop=asyncio", "--uds={socket}", "{app}"], "Uvicorn running on"),
    "granian": (["granian", "--interface=asgi", "--uds={socket}", "{app}"], "Started worker"),
    "hypercorn": (["hypercorn", "--bind=unix:{socket}", "{app}"], "Running on"),
}


class Server:
    """A running server, and its log."""

    def __init__(self, process: asyncio.subprocess.Process, path: str) -> None:
        self._process = process
        self._changed = asyncio.Event()
        self.path = path
        self.ended = asyncio.Event()
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self) -> httpx.AsyncClient:
        """A client with connections of its own."""
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self.path), base_url="http://test", timeout=None
        )

    async def read(self) -> None:
        """Read the log to its end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode().rstrip())
            self._changed.set()
        self.ended.set()
        self._changed.set()

    async def logs(self, text: str) -> None:
        """Wait for a line."""
        while not any(text in line for line in self.lines):
            assert not self.ended.is_set(), self.lines
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def web_server(kind: str, folder: Path, app: str = "web_app:app") -> AsyncGenerator[Server, None]:
    """Serve an app of this folder; SIGTERM ends it."""
    command, ready = COMMANDS[kind]
    path = str(folder / "socket")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *(part.format(socket=path, app=app) for part in command),
        cwd=_SUPPORT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    server = Server(process, path)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.read())
        try:
            await server.logs(ready)
            yield server
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
