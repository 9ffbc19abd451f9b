"""The coordinator's table of names. Pure.

A name belongs to an incarnation of an actor; it is free again when that incarnation is gone. Revisions only grow,
so that a watcher knows which it has seen.
"""

# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft.exceptions import NameNotFound, NameTaken

_VALID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a named actor is."""

    name: str
    peer: PeerId
    actor: ActorId
    # Its name in errors, and its class with all bases.
    label: str
    class_names: tuple[str, ...]
    revision: int


def check_name(name: str) -> str:
    """Return `name` if actors may have it.

    Raises:
        ValueError: It is empty, too long, or has characters that do not belong in a log line or a path.
    """
    if not isinstance(name, str) or _VALID.fullmatch(name) is None:
        raise ValueError(
            f"{name!r:.80} cannot name an actor: use 1 to 255 of the characters A-Z a-z 0-9 _ . - and no leading dot"
        )
    return name


class NameTable:
    """Names, and the actors that have them."""

    def __init__(self) -> None:
        self._names: dict[str, Registration] = {}
        self._revision = 0

    def register(
        self, name: str, peer: PeerId, actor: ActorId, label: str, class_names: tuple[str, ...]
    ) -> Registration:
        """Give a name to an actor. The same actor may ask again.

        Raises:
            NameTaken: Another actor has it.
        """
        check_name(name)
        held = self._names.get(name)
        if held is not None and (held.peer, held.actor) != (peer, actor):
            raise NameTaken(f"the name {name!r} belongs to {held.label}")
        self._revision += 1
        self._names[name] = Registration(name, peer, actor, label, class_names, self._revision)
        return self._names[name]

    def lookup(self, name: str) -> Registration:
        """The actor with a name.

        Raises:
            NameNotFound: No actor has it.
        """
        try:
            return self._names[name]
        except KeyError:
            known = ", ".join(sorted(self._names)) or "none"
            raise NameNotFound(f"no actor is named {name!r}; names in use: {known}") from None

    def release(self, peer: PeerId, actor: ActorId | None = None) -> list[str]:
        """Free the names of an actor, or of every actor of a process, that is gone."""
        gone = [r.name for r in self._names.values() if r.peer == peer and actor in (None, r.actor)]
        for name in gone:
            del self._names[name]
        return gone

    def names_of(self, peer: PeerId, actor: ActorId) -> tuple[str, ...]:
        return tuple(r.name for r in self._names.values() if (r.peer, r.actor) == (peer, actor))
