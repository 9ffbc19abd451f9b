"""Memory of the user: read and written in place, and registered once for any number of transfers.

Nothing here is released by hand: a region stays registered while a block of it is referred to, a grant of such a block
is out, or a transfer into it is under way. All of them keep the memory itself alive.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import TypeAlias

from aiodaft_transport.memory.address import address_of
from aiodaft_transport.memory.block_pool import Pullable
from aiodaft_transport.memory.host_pool import ArenaBlock


class Region:
    """A range of memory. When it is not referred to any more, `on_closed` gets its number, in any thread."""

    __slots__ = ("__weakref__", "address", "id", "size")

    def __init__(self, number: int, address: int, size: int, on_closed: Callable[[int], object]) -> None:
        self.id = number
        self.address = address
        self.size = size
        weakref.finalize(self, on_closed, number).atexit = False


class LentBlock(Pullable):
    """Part of a region. There is nothing to release or to retire: the memory belongs to the user."""

    __slots__ = ("address", "offset", "segment", "view")

    def __init__(self, region: Region, view: memoryview) -> None:
        super().__init__(view.nbytes)
        self.segment = region
        self.view = view
        self.address = address_of(view)
        self.offset = self.address - region.address


class LoanedBlock(LentBlock):
    """A block of another transport of this process. Its grants are grants of that block."""

    __slots__ = ("_original",)

    def __init__(self, region: Region, original: ArenaBlock) -> None:
        super().__init__(region, original.view)
        self._original = original

    def take_grant(self) -> None:
        self._original.take_grant()

    def return_grant(self) -> None:
        self._original.return_grant()


# Memory of the host that peers may pull.
Block: TypeAlias = ArenaBlock | LentBlock


class Regions:
    """The registered regions of one process, which do not overlap. Every method may be called in any thread."""

    def __init__(self, next_number: Callable[[], int], on_closed: Callable[[int], object]) -> None:
        self._next_number = next_number
        self._on_closed = on_closed
        # Reentrant: garbage can be collected anywhere, and tensors among it unregister themselves.
        self._lock = threading.RLock()
        self._regions: dict[int, Region] = {}
        # Never changed but replaced, so that a search is not led astray.
        self._starts: list[int] = []

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            if address not in self._regions:
                self._regions[address] = self._region(address, nbytes)
                starts = self._starts.copy()
                insort(starts, address)
                self._starts = starts

    def remove(self, address: int) -> None:
        with self._lock:
            self._starts = [start for start in self._starts if start != address]
            self._regions.pop(address, None)

    def find(self, view: memoryview) -> LentBlock | None:
        """The block that this memory is, if it lies within one region."""
        address, starts = address_of(view), self._starts
        index = bisect_right(starts, address)
        region = self._regions.get(starts[index - 1]) if index else None
        if region is None or address + view.nbytes > region.address + region.size:
            return None
        return LentBlock(region, view)

    def find_or_make(self, view: memoryview) -> LentBlock:
        """The same, and if there is none, in a region that ends with the block."""
        return self.find(view) or LentBlock(self._region(address_of(view), view.nbytes), view)

    def _region(self, address: int, nbytes: int) -> Region:
        return Region(self._next_number(), address, nbytes, self._on_closed)
