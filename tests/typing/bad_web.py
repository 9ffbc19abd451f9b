"""Planted errors: a checker must report each of the marked lines, and no other."""

from __future__ import annotations

from fastapi import FastAPI
from good_web import actors

import aiodaft
from aiodaft import web


async def handler(app: FastAPI) -> None:
    web.cancel_on_disconnect("request")  # E01 not a request
    async with aiodaft.web.cancel_on_disconnect(app):  # E02 not a request
        pass


async def make(rt: aiodaft.Runtime) -> dict[str, object]:
    return {}


app = FastAPI()
app.add_middleware(web.Ingress, actors=actors, limits=64)  # E03 no such option
app.add_middleware(web.Ingress, actors=make)  # E04 not a context manager
web.Ingress(app, limit="many")  # E05 not a number
