"""Crawls a site: fetchers follow links, each page is fetched once, and a slow page holds up no other.

    pip install httpx
    python examples/crawl.py --pages 200

The site is made here, with links to and fro, pages that are missing, and pages that answer slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import AsyncGenerator
from time import perf_counter
from types import TracebackType

import httpx

import aiodaft


class Fetcher(aiodaft.Actor):
    """Fetches pages over connections that it keeps."""

    async def __aenter__(self) -> Fetcher:
        self.client = httpx.AsyncClient(trust_env=False)
        return self

    async def __aexit__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType) -> None:
        await self.client.aclose()

    @aiodaft.method(concurrency=16)
    async def links(self, url: str) -> tuple[str, list[str]]:
        """The page, and the links on it."""
        page = await self.client.get(url)
        page.raise_for_status()
        return url, [str(page.url.join(link)) for link in re.findall(r'href="([^"]+)"', page.text)]


class Frontier:
    """The pages that are still to be fetched, for `async for`; it ends when none is left, and none is under way."""

    def __init__(self, *urls: str) -> None:
        self.seen = set(urls)
        self.waiting: asyncio.Queue[str | None] = asyncio.Queue()
        self.open = len(urls)
        for url in urls:
            self.waiting.put_nowait(url)

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        while (url := await self.waiting.get()) is not None:
            yield url

    def fetched(self, links: list[str]) -> None:
        for link in set(links) - self.seen:
            self.seen.add(link)
            self.open += 1
            self.waiting.put_nowait(link)
        self.open -= 1
        if not self.open:
            self.waiting.put_nowait(None)


async def crawl(fetchers: aiodaft.Group[Fetcher], start: str) -> tuple[int, int]:
    """The numbers of pages and of those that failed."""
    frontier, failed = Frontier(start), 0
    async for found in fetchers.map(Fetcher.links, frontier, ordered=False, return_exceptions=True):
        if isinstance(found, BaseException):
            failed += 1
        frontier.fetched([] if isinstance(found, BaseException) else found[1])
    return len(frontier.seen), failed


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: int) -> None:
    """Page n links to 2n and 2n + 1, to the first one, and to one that is missing."""
    while line := await reader.readline():
        number = int(line.split()[1][1:] or b"1")
        while await reader.readline() not in {b"\r\n", b""}:
            pass
        if number % 10 == 0:
            await asyncio.sleep(0.02)
        text = "".join(f'<a href="/{to}">' for to in (2 * number, 2 * number + 1, 1) if to <= pages + 1)
        status = "404 Not Found" if number > pages else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
    writer.close()


async def main(pages: int, workers: int) -> None:
    site = await asyncio.start_server(lambda reader, writer: answer(reader, writer, pages), "127.0.0.1", 0)
    start = f"http://127.0.0.1:{site.sockets[0].getsockname()[1]}/1"
    async with site, aiodaft.Runtime(preload=("httpx",)) as rt, rt.group(workers, Fetcher) as fetchers:
        began = perf_counter()
        seen, failed = await crawl(fetchers, start)
        print(f"{seen} pages by {workers} fetchers in {perf_counter() - began:.2f} s, {failed} of them missing")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--pages", type=int, default=200)
    options.add_argument("--workers", type=int, default=2)
    aiodaft.run(main(**vars(options.parse_args())))
