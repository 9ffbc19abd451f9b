"""Who gets a value from whom when many want it, so that its producer sends it only twice. Pure.

Every process that asks the producer joins. The first two get the value from the producer; each later one from the
process that would be done with one copy more before any other. That makes a binomial tree of those who ask at the
same time, in which nobody sends more than the producer does. A process leaves once it has the value and no copy for
others. Only the second one keeps a copy without being asked for it: then whoever comes late, when all others have
left, still finds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .ids import PeerId

# How often the producer, or one of those who ask at the same time, sends a value.
SENDS: Final = 2
# A process that was let down so often is served by the producer.
PATIENCE: Final = 2


@dataclass(slots=True)
class _Node:
    source: PeerId | None = None
    # When it has the value, in units of one transfer, and to how many it passes it on.
    ready: int = 0
    given: int = 0
    # Nobody is sent here any more, but others may be waiting here.
    failing: bool = False
    # Where it was sent, it got nothing.
    let_down: bool = False
    disappointments: int = 0


class Fanout:
    """The processes that are getting, or passing on, one value."""

    def __init__(self) -> None:
        self._nodes: dict[PeerId, _Node] = {}
        # How often the producer itself has sent it.
        self.sent = 0

    @property
    def members(self) -> list[PeerId]:
        """Who may have a copy, or will."""
        return list(self._nodes)

    def join(self, peer: PeerId) -> PeerId | None:
        """Say who gives the value to a process: None for the producer, itself if it is getting it already."""
        node = self._nodes.get(peer)
        if node is None:
            node = _Node()
        elif not node.let_down:
            return peer
        node.let_down = False
        node.source = self._source_for(peer) if self.sent >= SENDS and node.disappointments < PATIENCE else None
        if node.source is None:
            self.sent += 1
            node.ready = self.sent
        else:
            source = self._nodes[node.source]
            source.given += 1
            node.ready = source.ready + source.given
        self._nodes[peer] = node
        return node.source

    def keeps(self, peer: PeerId) -> bool:
        """Whether a process that just joined is to keep a copy though nobody waits for it."""
        return self._nodes[peer].source is None and self.sent >= SENDS

    def leave(self, peer: PeerId) -> None:
        """A process has no copy for others, and nobody waits there."""
        self._nodes.pop(peer, None)

    def fail(self, peer: PeerId, source: PeerId) -> None:
        """A process was sent to another one and got nothing there; it will join again."""
        if source in self._nodes:
            self._nodes[source].failing = True
        node = self._nodes.get(peer)
        if node is not None:
            node.let_down = True
            node.disappointments += 1

    def _source_for(self, peer: PeerId) -> PeerId | None:
        able = [name for name, node in self._nodes.items() if not (node.failing or self._waits_for(name, peer))]

        def done(name: PeerId) -> tuple[bool, int, int]:
            node = self._nodes[name]
            return node.given >= SENDS, node.ready + node.given + 1, node.given

        return min(able, key=done, default=None)

    def _waits_for(self, name: PeerId | None, peer: PeerId) -> bool:
        """Whether one process, directly or not, waits for another, which must not wait for it in turn."""
        while name is not None and name != peer:
            node = self._nodes.get(name)
            name = None if node is None else node.source
        return name == peer
