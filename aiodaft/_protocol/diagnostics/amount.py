"""Numbers as people read them. Pure."""

from __future__ import annotations


def amount(size: int) -> str:
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def count(number: int, one: str, several: str = "") -> str:
    """So many of something; `several` is needed where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
