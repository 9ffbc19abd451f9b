"""A page that shows what a runtime does: actors, calls, transfers, memory, failures, logs. It can only look.

pip install ".[dashboard]"
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiodaft.dashboard.feed import Feed
from aiodaft.runtime import Runtime

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["app", "serve"]


def app(rt: Runtime, *, period: float = 1.0) -> Starlette:
    """The dashboard of a runtime as an app, to mount in one of yours: `app.mount("/aiodaft", dashboard.app(rt))`.

    It has the protection of the app around it, and none of its own: every client of your app can see it. Looks are
    taken only while a page is open.

    Args:
        rt: The runtime; it may be opened later.
        period: Seconds between two looks.

    Raises:
        ImportError: Starlette is not installed.
        ValueError: The period is not positive.
    """
    from aiodaft.dashboard.site import make_site  # noqa: PLC0415 - Starlette is optional

    return make_site(Feed(rt, period))


@asynccontextmanager
async def serve(
    rt: Runtime, *, host: str = "127.0.0.1", port: int = 0, public: bool = False, period: float = 1.0
) -> AsyncGenerator[str]:
    """Serve the dashboard of a runtime while the block runs; gives its address.

    The address has a secret part, so that other users of this machine cannot open the page.

    Args:
        rt: The runtime.
        host: The interface to listen at.
        port: 0 for any free one.
        public: Whether an interface that other machines reach is allowed. They connect without encryption; an app of
            yours around `app()` can do better.
        period: Seconds between two looks.

    Raises:
        ImportError: Starlette or uvicorn is not installed.
        OSError: The port is in use.
        ValueError: Other machines reach the interface, and `public` is not said; or the period is not positive.
    """
    from aiodaft.dashboard.server import serving  # noqa: PLC0415 - Starlette and uvicorn are optional

    async with serving(Feed(rt, period), host, port, public=public) as address:
        yield address
