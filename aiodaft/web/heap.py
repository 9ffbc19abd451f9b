"""The garbage collector of a server."""

from __future__ import annotations

import gc
from typing import Final

# So many new containers are looked at together. Python looks at 700 (until 3.12; 2,000 later): with 64 requests under
# way, nearly all of them are still in use then, count as old, and soon have it look at everything there is.
_YOUNG: Final = 10_000


class Heap:
    """Has the garbage collector leave alone what was there when a server began to answer requests.

    Source: `gc.freeze`, which Instagram contributed to CPython for servers.
    """

    _before: tuple[int, int, int] | None = None
    # Others have frozen nothing, which would have to stay so.
    _is_first = False

    def settle(self) -> None:
        """The app is up: modules, models and handles stay as long as it does."""
        self._before, self._is_first = gc.get_threshold(), not gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        gc.set_threshold(max(_YOUNG, self._before[0]), *self._before[1:])

    def unsettle(self) -> None:
        """The app ends. Nothing if it was not up."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            self._before = None
            if self._is_first:
                gc.unfreeze()
