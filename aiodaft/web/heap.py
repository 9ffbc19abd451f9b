"""The garbage collector of a server."""

from __future__ import annotations

import gc
from typing import ClassVar, Final

# So many new containers are looked at together. Python looks at 700 (until 3.12; 2,000 later): with 64 requests under
# way, nearly all of them are still in use then, count as old, and soon have it look at everything there is.
_YOUNG: Final = 10_000


class Heap:
    """Has the garbage collector leave alone the objects that were there when a server began to answer requests.

    There is one collector in a process: it is as before when the last of several apps ends.

    Source: `gc.freeze`, which Instagram contributed to CPython for servers.
    """

    # Those of the apps that are up.
    _settled: ClassVar[set[Heap]] = set()
    _before: ClassVar[tuple[int, int, int]]
    # Others have frozen nothing, which would have to stay so.
    _is_first: ClassVar[bool]

    def settle(self) -> None:
        """The app is up: modules, models and handles stay as long as it does."""
        if not Heap._settled:
            Heap._before, Heap._is_first = gc.get_threshold(), not gc.get_freeze_count()
            if young := Heap._before[0]:
                # A program that has set it to 0 wants no collections.
                gc.set_threshold(max(_YOUNG, young), *Heap._before[1:])
        Heap._settled.add(self)
        gc.collect()
        gc.freeze()

    def unsettle(self) -> None:
        """The app ends. Nothing if it was not up."""
        if self in Heap._settled:
            Heap._settled.remove(self)
            if not Heap._settled:
                gc.set_threshold(*Heap._before)
                if Heap._is_first:
                    gc.unfreeze()
