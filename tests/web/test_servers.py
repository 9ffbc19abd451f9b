"""An app under real web servers, in processes of their own, as users run them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from leaks import descendants, ended
from web_servers import COMMANDS, Server, web_server

pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(COMMANDS))
async def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """Each server in turn; it has served the tests before in this file."""
    async with web_server(request.param, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server, nothing_left_behind: None) -> AsyncIterator[httpx.AsyncClient]:
    async with server.client() as opened:
        yield opened


async def leave(server: Server, client: httpx.AsyncClient, path: str, prompt: str) -> None:
    """A client asks for something, and leaves when a model works on it; its work ends."""
    async with server.client() as leaving:
        request = asyncio.get_running_loop().create_task(leaving.get(path, params={"prompt": prompt}))
        await client.get("/until", params={"event": f"{prompt} began"})
        request.cancel()
        await asyncio.wait([request])
    await client.get("/until", params={"event": f"{prompt} ended"})


async def test_requests_are_answered_by_actors_of_the_app(client: httpx.AsyncClient) -> None:
    assert (await client.get("/generate", params={"prompt": "a"})).json() == "A"
    assert (await client.post("/upload", content=b"b" * 1_000_000)).json() == "B" * 1_000_000
    assert (await client.get("/stream", params={"prompt": "c"})).text == "data: c\n\ndata: end\n\n"


async def test_a_client_that_leaves_frees_the_slot_of_its_call(server: Server, client: httpx.AsyncClient) -> None:
    await leave(server, client, "/slot", "hold-slot 1")
    await leave(server, client, "/slot", "hold-slot 2")
    assert (await client.get("/slot", params={"prompt": "next"})).json() == "NEXT"


@pytest.mark.parametrize("path", ["/generate", "/block", "/limited/generate"])
async def test_a_client_that_leaves_cancels_its_call(server: Server, client: httpx.AsyncClient, path: str) -> None:
    await leave(server, client, path, f"hold-{path} 1")


async def test_a_client_that_leaves_a_stream_ends_its_producer(server: Server, client: httpx.AsyncClient) -> None:
    async with (
        server.client() as leaving,
        leaving.stream("GET", "/stream", params={"prompt": "hold-stream 1"}) as answer,
    ):
        assert await anext(answer.aiter_lines()) == "data: hold-stream 1"
        await client.get("/until", params={"event": "hold-stream 1 began"})
    await client.get("/until", params={"event": "hold-stream 1 ended"})


async def test_a_client_that_leaves_while_it_sends_does_no_harm(server: Server, client: httpx.AsyncClient) -> None:
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(server.path)
        half.sendall(b"POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\nabc")
        assert (await client.get("/generate", params={"prompt": "a"})).json() == "A"
    assert (await client.get("/generate", params={"prompt": "a"})).json() == "A"


async def test_of_ten_requests_two_run_three_wait_and_five_are_refused(client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(client.get("/limited/generate", params={"prompt": f"hold-overload {number}"}))
            for number in range(10)
        ]
        refused = [await answer for _, answer in zip(range(5), asyncio.as_completed(asked), strict=False)]
        assert [answer.status_code for answer in refused] == [503] * 5
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert {answer.text for answer in refused} == {"overloaded: come back in 1 s"}
        assert sum(not answer.done() for answer in asked) == 5
        await client.get("/release", params={"prompt": "hold-overload"})
    assert Counter(answer.result().status_code for answer in asked) == {200: 5, 503: 5}


async def test_a_full_queue_of_an_actor_is_answered_by_503(client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(client.get("/narrow")) for _ in range(5)]
        refused = [await answer for _, answer in zip(range(3), asyncio.as_completed(asked), strict=False)]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "1")] * 3
        # Names of actors, processes and hosts stay inside.
        assert {answer.text for answer in refused} == {"overloaded: come back in 1 s"}
        await client.get("/release", params={"prompt": "hold-narrow"})
    assert Counter(answer.result().status_code for answer in asked) == {200: 2, 503: 3}


async def test_probes_tell_which_actors_do_not_answer(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).text == "up\n"
    model = (await client.get("/pid")).json()
    os.kill(model, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(client.get("/readyz") for _ in range(3)))
    finally:
        os.kill(model, signal.SIGCONT)
    assert {(answer.status_code, answer.text) for answer in answers} == {(503, "Model-1 is silent\n")}
    while (answer := await client.get("/readyz")).status_code != 200:
        assert answer.text == "Model-1 is silent\n"
    assert answer.text == "ready\n"
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert 'aiodaft_actor_state{actor="Model-1",' in metrics.text
    # Without those of probes.
    (under_way,) = re.findall(r'^aiodaft_ingress_held_requests\{state="running"\} (.*)$', metrics.text, re.MULTILINE)
    (answered,) = re.findall(r'^aiodaft_ingress_requests_total\{outcome="answered"\} (.*)$', metrics.text, re.MULTILINE)
    assert (float(under_way), float(answered) >= 1) == (0, True)
    # Below an ingress without actors, and below the app, the paths are those of the app.
    assert (await client.get("/limited/healthz")).status_code == 404


async def test_sigterm_ends_the_app_and_then_its_actors_and_nothing_was_logged_as_an_error(server: Server) -> None:
    async with server.client() as client:
        model = (await client.get("/pid")).json()
    processes = descendants(server.pid)
    assert model in processes
    os.kill(server.pid, signal.SIGTERM)
    await server.ended.wait()
    await ended(*processes)
    told = [line for line in server.lines if line.startswith("the ")]
    assert told == ["the model is up", "the app begins", "the app ends", "the model still answers: LAST"]
    assert not any(sign in line for line in server.lines for sign in ("Traceback", "ERROR", "Exception")), server.lines
