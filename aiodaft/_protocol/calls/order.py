"""The order in which one process submits calls, and runs of graphs, to actors. Pure: it says what may go out.

The rule: the entries for one actor go out in the order of submission. An entry stands in the lanes of all
actors that it is for. It goes out when it may and stands first in each of them. It enters all of them at once, so no
two entries wait for each other.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    @property
    def lanes(self) -> Sequence[Hashable]: ...

    def may_go(self) -> bool: ...


EntryT = TypeVar("EntryT", bound=Entry)


class Order(Generic[EntryT]):
    """The entries that one process has submitted and not sent: those that cannot go at once, and those behind them."""

    def __init__(self) -> None:
        # By actor: its entries, each with its place in the order of submission. An actor without entries has no lane.
        self.lanes: dict[Hashable, OrderedDict[EntryT, int]] = {}
        self._places = itertools.count()
        # Lanes in which something has changed, while entries are taken out.
        self._changed: deque[Hashable] = deque()
        self._taking = False

    def holds_up(self, lanes: Iterable[Hashable]) -> bool:
        """Whether an entry that is submitted now, for these lanes, has to wait behind another."""
        return not self.lanes.keys().isdisjoint(lanes)

    def enter(self, entry: EntryT) -> None:
        place = next(self._places)
        for lane in entry.lanes:
            self.lanes.setdefault(lane, OrderedDict())[entry] = place

    def move(self, entry: EntryT, lanes: Sequence[Hashable]) -> None:
        """Take an entry to other lanes, where it gets the place of its submission, in front of all that came later.

        The caller gives the entry its new lanes; the entry, and those in the old lanes, may be `ready` then.
        """
        place = self.lanes[entry.lanes[0]][entry]
        self.leave(entry)
        for lane in lanes:
            entries = self.lanes.setdefault(lane, OrderedDict())
            behind = [other for other, others_place in entries.items() if others_place > place]
            entries[entry] = place
            for other in behind:
                entries.move_to_end(other)

    def leave(self, entry: EntryT) -> None:
        for lane in entry.lanes:
            entries = self.lanes[lane]
            del entries[entry]
            if not entries:
                del self.lanes[lane]

    def ready(self, lanes: Iterable[Hashable]) -> Iterator[EntryT]:
        """Take out the entries that may go now, one after the other, because something has changed in these lanes.

        Each entry has to be sent before the next is asked for. Changes that happen meanwhile are seen here, too.
        """
        self._changed.extend(lanes)
        if self._taking:
            return
        self._taking = True
        try:
            while self._changed:
                entries = self.lanes.get(self._changed.popleft())
                if entries is None:
                    continue
                entry = next(iter(entries))
                if self._is_first(entry) and entry.may_go():
                    self.leave(entry)
                    yield entry
                    self._changed.extend(entry.lanes)
        finally:
            self._taking = False

    def _is_first(self, entry: EntryT) -> bool:
        return all(next(iter(self.lanes[lane])) is entry for lane in entry.lanes)
