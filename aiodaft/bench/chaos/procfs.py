"""Processes, as the system sees them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "is_alive"]


def descendants(pid: int) -> list[str]:
    """Living processes below one."""
    found: list[str] = []
    # Threads and children may end while they are looked at.
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    if is_alive(child):
                        found += [child, *descendants(int(child))]
    return found


def is_alive(pid: str) -> bool:
    """Whether a process exists, and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
