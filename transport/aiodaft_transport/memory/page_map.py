"""The pages of this process that are private copies of those of a file.

Source: Documentation/admin-guide/mm/pagemap.rst of the Linux kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from mmap import PAGESIZE
from typing import Final

from aiodaft_transport.forks import fork_count

# In the top byte of an entry: bit 7 present, bit 6 swapped, bit 5 page of a file.
_IS_PRIVATE: Final = bytes(1 if byte & 0b1100_0000 and not byte & 0b0010_0000 else 0 for byte in range(256))


class PageMap:
    """The page map of this process. It stays open, because to open it takes longer than to read it."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._forks = fork_count()
        self._opened_at = 0

    def private_pages(self, address: int, pages: int) -> Iterator[int]:
        """Indices of the pages from `address` on of which this process has a private copy.

        Raises:
            OSError: There is no descriptor to open it.
        """
        if self._opened_at != self._forks.value:
            # A forked child has that of its parent.
            self.close()
        if self._fd is None:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._opened_at = self._forks.value
        entries = os.pread(self._fd, pages * 8, address // PAGESIZE * 8)
        flags = entries[7::8].translate(_IS_PRIVATE)
        index = flags.find(1)
        while index >= 0:
            yield index
            index = flags.find(1, index + 1)

    def close(self) -> None:
        """Close it; it is opened again when it is needed. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
