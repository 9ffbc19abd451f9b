"""Counts the words of files: `python main.py FILE...`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

import aiodaft

from actors import Reader, Totals


async def count_words(rt: aiodaft.Runtime, texts: Iterable[str], readers: int = 4) -> list[tuple[str, int]]:
    """The ten most common words of some texts, which readers count side by side."""
    async with rt.scope() as scope:
        # The scope stops its actors at its end.
        group = await scope.group(readers, Reader)
        totals = await scope.spawn(Totals)
        await asyncio.gather(*(totals.add(group.any(Reader.count, text)) for text in texts))
        return await totals.most_common(10)


async def main(texts: list[str]) -> None:
    """Print the most common words of some texts."""
    async with aiodaft.Runtime() as rt:
        for word, number in await count_words(rt, texts):
            print(f"{number:6} {word}")


if __name__ == "__main__":
    aiodaft.run(main([Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]]))
