"""The same app in frameworks that no other test uses, each behind an ingress, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from aiodaft.web import Ingress


async def work(name: str) -> None:
    """Does not end by itself, and takes a while to clean up."""
    print(f"{name} began", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        # Longer than an ingress looks on.
        await asyncio.sleep(0.1)
        print(f"{name} ended", flush=True)


async def lines() -> AsyncIterator[str]:
    yield "first\n"
    await work("stream")


def of_quart() -> Any:
    import quart

    app = quart.Quart("app")

    @app.get("/plain")
    async def plain() -> None:
        await work("plain")

    @app.get("/stream")
    async def stream() -> Any:
        return lines(), 200

    return app


# Django finds them by the name of this module.
urlpatterns: list[Any] = []


def of_django() -> Any:
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import StreamingHttpResponse
    from django.urls import path

    async def plain(request: Any) -> None:
        await work("plain")

    async def stream(request: Any) -> Any:
        return StreamingHttpResponse(lines())

    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test")
    urlpatterns[:] = [path("plain", plain), path("stream", stream)]
    return get_asgi_application()


def of_sanic() -> Any:
    import sanic

    app = sanic.Sanic("app", configure_logging=False)

    @app.get("/plain")
    async def plain(request: Any) -> None:
        await work("plain")

    @app.get("/stream")
    async def stream(request: Any) -> None:
        answer = await request.respond()
        async for line in lines():
            await answer.send(line)

    return app


def of_blacksheep() -> Any:
    import blacksheep

    app = blacksheep.Application()

    async def plain() -> None:
        await work("plain")

    async def encoded() -> AsyncIterator[bytes]:
        async for line in lines():
            yield line.encode()

    async def stream() -> Any:
        return blacksheep.Response(200, content=blacksheep.StreamedContent(b"text/plain", encoded))

    app.router.add_get("/plain", plain)
    app.router.add_get("/stream", stream)
    return app


def of_falcon() -> Any:
    import falcon.asgi

    class Plain:
        async def on_get(self, request: Any, response: Any) -> None:
            await work("plain")

    class Stream:
        async def on_get(self, request: Any, response: Any) -> None:
            response.sse = self.events()

        async def events(self) -> AsyncIterator[Any]:
            async for line in lines():
                yield falcon.asgi.SSEvent(text=line)

    app = falcon.asgi.App()
    app.add_route("/plain", Plain())
    app.add_route("/stream", Stream())
    return app


MAKERS = {"quart": of_quart, "django": of_django, "sanic": of_sanic, "blacksheep": of_blacksheep, "falcon": of_falcon}


def __getattr__(name: str) -> Any:
    """The app of a framework, as servers ask for it: `framework_apps:quart`."""
    if name not in MAKERS:
        raise AttributeError(name)
    return _app(name)


@cache
def _app(name: str) -> Ingress:
    return Ingress(MAKERS[name](), limit=1, queue=1)
