"""An actor whose methods choose how their results travel."""

from __future__ import annotations

from typing import Final

from aiodaft import Actor, method

SIZE: Final = 1 << 20


class Maker(Actor):
    """Gives the same by several ways."""

    @method
    async def usual(self) -> bytes:
        return bytes(SIZE)

    @method(transport="tcp")
    async def by_tcp(self) -> bytes:
        return bytes(SIZE)

    @method(transport="tcp")
    def by_tcp_on_thread(self) -> bytes:
        return bytes(SIZE)

    @method(transport="pigeon")
    async def by_pigeon(self) -> bytes:
        return bytes(SIZE)
