"""The actors of this project. Each lives in a process of its own."""

from __future__ import annotations

from collections import Counter

import aiodaft


class Reader(aiodaft.Actor):
    """Counts the words of texts."""

    @aiodaft.method
    def count(self, text: str) -> Counter[str]:
        """The words of a text, and how often each occurs. A `def` method may compute for long: it has a thread."""
        return Counter(word.strip(".,;:!?\"'()").lower() for word in text.split())


class Totals(aiodaft.Actor):
    """Adds up the counts of readers."""

    def __init__(self) -> None:
        self._words: Counter[str] = Counter()

    @aiodaft.method
    async def add(self, counted: Counter[str]) -> int:
        """Add the words of a text; returns the number of different words so far."""
        self._words.update(counted)
        return len(self._words)

    @aiodaft.method
    async def most_common(self, number: int) -> list[tuple[str, int]]:
        """The most common words, with their numbers."""
        return self._words.most_common(number)
