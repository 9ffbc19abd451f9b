"""Requests to the application, with actors in this process."""

from __future__ import annotations

import httpx
from aiodaft.testing import in_process

from app import make_app


async def test_texts_are_counted() -> None:
    app = make_app(lambda: in_process(unhandled="log"))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        assert (await client.post("/texts", json={"text": "a b a"})).json() == {"words": 2}
        assert (await client.post("/texts", json={"text": "c"})).json() == {"words": 3}
        assert (await client.get("/words", params={"number": 1})).json() == {"a": 2}
        assert (await client.post("/texts", json={})).status_code == 422
