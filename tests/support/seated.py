"""Members of groups that say what they know of their group."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiodaft
from aiodaft import Actor, Group, method


@dataclass(frozen=True)
class Seen:
    """A member's view of its group."""

    id: str
    epoch: int
    rank: int
    size: int
    axes: dict[str, int]
    coords: dict[str, int]
    members: tuple[Any, ...] | str


def look(*along: str) -> Seen:
    group = aiodaft.current_group()
    if along:
        group = group.along(*along)
    try:
        members: tuple[Any, ...] | str = group.members
    except RuntimeError as error:
        members = str(error)
    return Seen(group.id, group.epoch, group.rank, group.size, dict(group.axes), dict(group.coords), members)


class Seated(Actor):
    """Looks when it is made, entered and called."""

    def __init__(self, gate: str = "") -> None:
        self.gate = gate
        self.seen = [look()]
        self.group = aiodaft.current_group()

    async def __aenter__(self) -> Self:
        self.seen.append(look())
        return self

    async def __aexit__(self, *_: object) -> None:
        look()

    def on_restart(self, epoch: int) -> None:
        self.seen.append(look())
        if self.gate:
            with open(self.gate, encoding="utf-8"):
                pass

    @method
    async def early(self) -> list[Seen]:
        """The rosters that it has seen before its first call."""
        return self.seen

    @method
    async def look(self, *along: str) -> Seen:
        return look(*along)

    @method
    def look_in_thread(self) -> Seen:
        return look()

    @method
    async def kept(self) -> tuple[int, bool, int]:
        """The group that it has asked for in its constructor: its size, whether it is current, the known members."""
        return self.group.size, self.group.is_current, len(self.group.members)

    @method
    async def next_rank(self) -> int:
        """The rank of its neighbour, which says so itself."""
        group: aiodaft.typing.CurrentGroup[Seated] = aiodaft.current_group()
        return (await group.members[(group.rank + 1) % group.size].look()).rank

    @method
    async def give_away(self) -> object:
        return aiodaft.current_group()

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Leaver(Actor):
    """Says its rank when it is left."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        (self.folder / str(aiodaft.current_group().rank)).touch()


class Founder(Actor):
    """Makes a group of its own."""

    @method
    async def found(self) -> list[Seen]:
        group = await aiodaft.current_runtime().group(2, Seated)
        return await group.all(Seated.look)

    @method
    async def hand_over(self, passer: Passer) -> None:
        """Give another actor a group that ends with this one."""
        await passer.keep(await aiodaft.current_runtime().group(2, Seated))


class Loner(Actor):
    """Is asked for its group."""

    @method
    async def look(self) -> Seen:
        return look()


class Passer(Actor):
    """Gets a group as an argument."""

    def __init__(self) -> None:
        self.group: Group[Seated] | None = None

    @method
    async def keep(self, group: Group[Seated]) -> int:
        self.group = group
        return group.epoch

    @method
    async def drop(self) -> None:
        self.group = None

    @method
    async def shown(self) -> str:
        return repr(self.group)

    @method
    async def waits_for_size(self, size: int) -> tuple[int, dict[str, int], list[int]]:
        """Once its copy has so many members: the epoch, the axes, and the ranks that answer."""
        assert self.group is not None
        while len(self.group) != size:
            await asyncio.sleep(0)
        answers = await self.group.all(Seated.look)
        return self.group.epoch, dict(self.group.axes), [seen.rank for seen in answers]

    @method
    async def name(self, group: Group[Seated]) -> tuple[str, int, dict[str, int], str]:
        return group.id, group.epoch, dict(group.axes), (await group[0].look()).id


class Plain:
    """Knows nothing of actors, but for its group."""

    def __init__(self) -> None:
        self.rank = aiodaft.current_group().rank

    def neighbour(self) -> tuple[int, str]:
        group = aiodaft.current_group()
        return self.rank, type(group.members[1 - group.rank]).__name__


class Stage(Actor):
    """A member that is called as one with others; keeps its arguments."""

    def __init__(self) -> None:
        self.rank = aiodaft.current_group().rank
        self.got: list[Any] = []
        self.gate = asyncio.Event()

    @method
    async def take(self, value: Any, *, more: int = 0) -> tuple[int, Any]:
        self.got.append(value)
        return self.rank, value

    @method
    async def news(self) -> list[Any]:
        """The arguments that it has got since the last time."""
        got, self.got = self.got, []
        return got

    @method
    async def fail_at(self, ranks: tuple[int, ...]) -> int:
        if self.rank in ranks:
            raise ValueError(f"{self.rank} failed")
        return self.rank

    @method
    async def fail_or_wait(self, failing: int) -> int:
        """The other members wait until they are cancelled."""
        if self.rank == failing:
            raise ValueError(f"{self.rank} failed")
        try:
            await asyncio.Event().wait()
        finally:
            self.got.append("cancelled")
        return self.rank

    @method
    async def held(self, value: Any) -> int:
        self.got.append(value)
        await self.gate.wait()
        return self.rank

    @method
    async def open(self) -> None:
        self.gate.set()

    @method
    async def large(self, size: int) -> bytes:
        return bytes([self.rank]) * size

    @method
    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word


class PlainStage:
    """The same, of a class that is no actor."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def take(self, value: list[int]) -> int:
        self.got.append(value)
        return sum(value)

    def news(self) -> list[Any]:
        return self.got


class Viewer(Actor):
    """Calls a view of a group from another process."""

    @method
    async def each(self, view: Group[Stage], items: list[int]) -> list[Any]:
        return await view.each(Stage.take, items)
