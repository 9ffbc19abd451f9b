"""The coordinator: the actor that knows actors by their names. No call and no transfer waits for it."""

from __future__ import annotations

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.naming import NameTable, Registration
from aiodaft.actor import Actor
from aiodaft.methods import method


class Coordinator(Actor):
    """The names of actors."""

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
        """The actor with a name."""
        return self._names.lookup(name)

    @method
    async def names_of(self, peer: str, actor: int) -> tuple[str, ...]:
        """The names of an actor."""
        return self._names.names_of(PeerId(peer), ActorId(actor))

    @method
    async def release(self, peer: str, actor: int | None) -> None:
        """Free the names of an actor that is gone, or of every actor of a process."""
        self._names.release(PeerId(peer), None if actor is None else ActorId(actor))
