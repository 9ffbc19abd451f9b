"""A real web server on this loop, without threads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal

import uvicorn


@asynccontextmanager
async def serving(app: Any, lifespan: Literal["on", "auto"] = "on") -> AsyncGenerator[str, None]:
    """Serve an ASGI app, lifespan and all; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, lifespan=lifespan, ws="none", log_config=None))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.serve(sockets=[listener]))
            while not (server.started or task.done()):
                await asyncio.sleep(0.01)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                server.should_exit = True
                await task  # an error of the block would cancel it in the middle of its lifespan
