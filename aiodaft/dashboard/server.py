"""A server for the dashboard alone, on the loop of the program."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from uvicorn.protocols.http.h11_impl import H11Protocol

from aiodaft._runtime.platform.tasks import TaskOwner, see_through
from aiodaft.dashboard.feed import Feed
from aiodaft.dashboard.site import make_site

_MAX_STRANGERS: Final = 32


class _Connection(H11Protocol):
    """The connections that have not asked for anything under the secret address: of too many, the oldest is closed."""

    def __init__(self, strangers: dict[_Connection, None], secret: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._strangers = strangers
        self._secret = secret

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._strangers[self] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.scope and self.scope["path"].startswith(f"/{self._secret}/"):
            self._strangers.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves signals to the program, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serving(feed: Feed, host: str, port: int, *, public: bool) -> AsyncGenerator[str]:
    _check_host(host, public=public)
    secret = secrets.token_urlsafe(16)
    hidden = Starlette(routes=[Mount(f"/{secret}", make_site(feed))])
    config = uvicorn.Config(
        hidden, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    strangers: dict[_Connection, None] = {}
    config.http = cast("Any", partial(_Connection, strangers, secret))
    server = _Server(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tasks = TaskOwner("aiodaft dashboard")
    with socket.create_server((host, port), family=family) as listener:
        task = tasks.start(server.serve(sockets=[listener]), name="aiodaft dashboard")
        task.add_done_callback(lambda _: server.listens.set())
        try:
            await server.listens.wait()
            shown = f"[{host}]" if family == socket.AF_INET6 else host
            yield f"http://{shown}:{listener.getsockname()[1]}/{secret}/"
        finally:
            server.should_exit = True
            feed.close()
            await see_through(task)


def _check_host(host: str, *, public: bool) -> None:
    """Raise ValueError if other machines reach an interface, and that is not wanted."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not (is_local or public):
        raise ValueError(
            f"host={host!r}: other machines could open the dashboard, which shows the names, errors and output of "
            "actors; say public=True if they may, or mount dashboard.app(rt) in an app that knows its users"
        )
