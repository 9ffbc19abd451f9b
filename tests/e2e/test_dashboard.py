"""The dashboard over HTTP: its pages, its readers, and its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from leaks import open_files
from overseen import Source
from web_server import serving

import aiodaft
from aiodaft import dashboard

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def frames_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The looks that a stream brings."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def looking(address: str, **headers: str) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
    url = f"{address}events"
    async with httpx.AsyncClient(timeout=20) as client, client.stream("GET", url, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield frames_of(response)


async def test_a_page_and_its_looks_come_from_one_address(log_only: aiodaft.Runtime) -> None:
    rt = log_only
    source = await rt.spawn(Source)
    async with dashboard.serve(rt, period=0.05) as address, httpx.AsyncClient() as client:
        page = await client.get(address)
        for name in ("style.css", "main.js", "icon.svg"):
            assert f'"{name}"' in page.text
            assert (await client.get(address + name)).status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        async with looking(address) as frames:
            assert [actor["name"] for actor in (await anext(frames))["actors"]] == [(await rt.info(source)).name]
            for _ in range(5):
                await source.take(b"1")
            while (frame := await anext(frames))["actors"][0]["done"] < 5:
                pass
            assert frame["seconds"] > 0
        # It can only look.
        assert (await client.post(address)).status_code == 405
        assert (await client.post(f"{address}events")).status_code == 405


async def test_without_the_secret_part_of_the_address_nothing_is_there(log_only: aiodaft.Runtime) -> None:
    async with dashboard.serve(log_only) as address, httpx.AsyncClient() as client:
        root = address.split("/")
        assert root[2].startswith("127.0.0.1:")
        assert len(root[3]) > 20
        for path in ("", "/", "/events", "/guess/", "/index.html", f"/{root[3][:-1]}/"):
            assert (await client.get(f"http://{root[2]}{path}")).status_code == 404


async def test_strangers_that_do_not_know_the_secret_part_take_no_descriptors(log_only: aiodaft.Runtime) -> None:
    loop = asyncio.get_running_loop()
    async with dashboard.serve(log_only, period=0.05) as address, looking(address) as frames:
        await anext(frames)
        before, at = len(open_files()), urlsplit(address)
        with ExitStack() as stack:
            for _ in range(100):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                await loop.sock_connect(sock, (at.hostname, at.port))
            async with httpx.AsyncClient() as client:
                assert (await client.get(address)).status_code == 200
            # Their own ends are open here, too.
            assert len(open_files()) - before <= 100 + 40
            # A page that is open stays so.
            assert (await anext(frames))["actors"] == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
async def test_other_machines_reach_it_only_if_that_is_said(log_only: aiodaft.Runtime, host: str) -> None:
    with pytest.raises(ValueError, match="public=True"):
        async with dashboard.serve(log_only, host=host):
            pass


async def test_it_is_public_if_that_is_said(log_only: aiodaft.Runtime) -> None:
    async with dashboard.serve(log_only, host="0.0.0.0", public=True) as address, httpx.AsyncClient() as client:
        assert (await client.get(address.replace("0.0.0.0", "127.0.0.1"))).status_code == 200


async def test_it_ends_at_once_with_pages_open_and_raises_what_the_block_raises(log_only: aiodaft.Runtime) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(10), dashboard.serve(log_only, period=3600) as address:
                request = client.build_request("GET", f"{address}events")
                response = await client.send(request, stream=True)
                frames = frames_of(response)
                await anext(frames)
                raise ZeroDivisionError
        assert await anext(frames) == {}
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
        await response.aclose()


async def test_a_stream_goes_on_where_the_last_one_ended(log_only: aiodaft.Runtime) -> None:
    source = await log_only.spawn(Source)
    await source.say("the first word")
    async with dashboard.serve(log_only, period=0.1) as address:
        async with looking(address) as frames:
            first = await anext(frames)
            said = await until_said(frames, first, "the first word")
        (printed,) = [line for line in said if line["text"] == "the first word"]
        (logged,) = [line for line in said if line["text"] == "logged: the first word"]
        name = (await log_only.info(source)).name
        assert (printed["actor"], printed["level"], logged["actor"], logged["level"]) == (name, "", name, "WARNING")

        await source.say("the second word")
        here = first["runtime"]
        async with looking(address, **{"last-event-id": f"{here} 1 {len(said) - 1}"}) as frames:
            second = await anext(frames)
            assert second["taken"] > first["taken"]
            said = await until_said(frames, second, "the second word")
        assert "the first word" not in {line["text"] for line in said}
        # Pages of another program, which was here before, begin again.
        for place in ("controller-other 1 1", "nonsense"):
            async with looking(address, **{"last-event-id": place}) as frames:
                assert "the first word" in {line["text"] for line in (await anext(frames))["lines"]}


async def until_said(frames: AsyncIterator[dict[str, Any]], frame: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """All lines from a frame on, when two of them have this text."""
    said = list(frame["lines"])
    while sum(text in line["text"] for line in said) < 2:
        said += (await anext(frames))["lines"]
    return said


async def test_it_is_part_of_an_app_of_the_user(log_only: aiodaft.Runtime) -> None:
    app = FastAPI()
    app.mount("/inside/aiodaft", dashboard.app(log_only, period=0.05))
    async with serving(app) as address, httpx.AsyncClient(follow_redirects=True) as client:
        page = await client.get(f"{address}/inside/aiodaft")
        assert str(page.url) == f"{address}/inside/aiodaft/"
        assert (await client.get(f"{page.url}main.js")).status_code == 200
        async with looking(str(page.url)) as frames:
            assert (await anext(frames))["runtime"] == (await log_only.overview()).runtime


async def test_a_closed_runtime_is_the_end(nothing_left_behind: None) -> None:
    rt = aiodaft.Runtime(preload=())
    app = FastAPI()
    app.mount("/aiodaft", dashboard.app(rt, period=0.05))
    async with serving(app) as address, rt, looking(f"{address}/aiodaft/") as frames:
        await anext(frames)
        await rt.aclose()
        while await anext(frames):
            pass
