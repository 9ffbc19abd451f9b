"""A connection to an etcd cluster: to one member after the other, until one answers; and watches that outlive it.

Needs aetcd: `pip install ".[etcd]"`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import aetcd  # pyright: ignore[reportMissingTypeStubs]

from aiodaft._runtime.coordination.store import StoreFailed

T = TypeVar("T")

# Seconds that a member gets for an answer, that all get together, and between two attempts.
_ATTEMPT: Final = 2
_PATIENCE: Final = 6.0
_PAUSE: Final = 0.1
_OPTIONS: Final = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.max_receive_message_length": 64 << 20,
}


class Address(NamedTuple):
    """The host and port of a member of the etcd cluster."""

    host: str
    port: int


class EtcdEvent(NamedTuple):
    """A change of a key; `value` is None if it was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class EtcdLink:
    """The connection to one member at a time."""

    def __init__(self, members: Sequence[Address]) -> None:
        self._members = members
        self._current = 0
        self._client: Any = None

    async def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Have a client (of aetcd) ask something, again and elsewhere if it fails.

        Raises:
            StoreFailed: No member answers.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE
        while True:
            try:
                return await question(await self.client())
            except aetcd.ClientError as error:
                # The error itself cannot travel to the callers of the coordinator.
                why = str(error)
            await self.next_member()
            if loop.time() > until:
                raise StoreFailed(f"no member of etcd at {self} answers: {why}")
            await asyncio.sleep(_PAUSE)

    async def client(self) -> Any:
        if self._client is None:
            host, port = self._members[self._current]
            self._client = aetcd.Client(host, port, timeout=_ATTEMPT, options=_OPTIONS)
            await self._client.connect()
        return self._client

    async def next_member(self) -> None:
        """Turn to another member, because this one does not answer."""
        self._current = (self._current + 1) % len(self._members)
        await self.aclose()

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self._members)


async def events(link: EtcdLink, prefix: bytes, since: int) -> AsyncGenerator[EtcdEvent, None]:
    """The changes of keys with a prefix after a revision, each once, also where members come and go.

    Raises:
        aetcd.RevisionCompactedError: etcd does not remember that far back.
    """
    # Events of one transaction have one revision, and the connection may break between them.
    seen: set[bytes] = set()
    first = since + 1
    while True:
        try:
            client = await link.client()
            watch = await client.watch_prefix(prefix, start_revision=first)
            async for event in watch:
                revision, key = event.kv.mod_revision, event.kv.key
                if revision > first:
                    first, seen = revision, set()
                if revision < first or key in seen:
                    continue
                seen.add(key)
                yield EtcdEvent(revision, key, None if event.kind == aetcd.EventKind.DELETE else event.kv.value)
        except aetcd.RevisionCompactedError:
            raise
        except aetcd.ClientError:
            await link.next_member()
            await asyncio.sleep(_PAUSE)
