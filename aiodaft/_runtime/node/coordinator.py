"""The coordinator: names, as an ordinary actor. No call and no transfer ever waits for it."""

from __future__ import annotations

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.naming import NameTable, Registration
from aiodaft.actor import Actor
from aiodaft.methods import method


class Coordinator(Actor):
    """Who is called what."""

    def __init__(self) -> None:
        self._names = NameTable()

    @method
    async def register(
        self, name: str, peer: str, actor: int, label: str, class_names: tuple[str, ...]
    ) -> Registration:
        """Give a name to an actor."""
        return self._names.register(name, PeerId(peer), ActorId(actor), label, class_names)

    @method
    async def lookup(self, name: str) -> Registration:
        """Who has a name."""
        return self._names.lookup(name)

    @method
    async def names_of(self, peer: str, actor: int) -> tuple[str, ...]:
        """The names of an actor."""
        return self._names.names_of(PeerId(peer), ActorId(actor))

    @method
    async def release(self, peer: str, actor: int | None) -> None:
        """An actor, or every actor of a process, is gone."""
        self._names.release(PeerId(peer), None if actor is None else ActorId(actor))
