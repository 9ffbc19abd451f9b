"""The tokens that the next step of an engine computes, and the places of their keys and values.

Decisions only, for `serve_engine.py`: nothing here computes or waits.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from serve_pages import PAGE, Pages, Sequence

NEWS = 256  # tokens


class Row(NamedTuple):
    """Tokens of one sequence for one step. `pages` is a copy: the sequence may lose its own during the step."""

    sequence: Sequence
    start: int
    tokens: bytes
    pages: tuple[int, ...]


class Sizes(NamedTuple):
    pages: int = 256
    places: int = 16  # sequences at a time
    chunk: int = 32  # tokens of a prompt in one step


class Load(NamedTuple):
    """The load that an engine pushes to routers.

    Attributes:
        work: The tokens that it has to compute.
        places: The sequences that it can have at a time.
        forgotten: Beginnings of prompts whose keys and values it does not have any more.
        process: Its host and process id.
        layers: Those of its model.
    """

    work: int
    places: int
    forgotten: Iterable[bytes] = ()
    process: object = None
    layers: int = 0


class Batch:
    """The sequences of an engine. A step computes the next token of all that decode, and a chunk of one prompt."""

    def __init__(self, sizes: Sizes) -> None:
        self.pages, self.places, self.chunk = Pages(sizes.pages), sizes.places, sizes.chunk
        self.waiting, self.running = deque[Sequence](), list[Sequence]()  # the oldest first
        self.preempted = self.prompt_tokens = self.hit_tokens = self.told = 0

    @property
    def work(self) -> int:
        """Tokens to compute for the sequences here."""
        return sum(sequence.end - sequence.cached for sequence in (*self.waiting, *self.running))

    @property
    def has_news(self) -> bool:
        """Whether routers should be told of a load that differs much from the last one."""
        return abs(self.work - self.told) + PAGE * len(self.pages.forgotten) >= NEWS

    def load(self) -> Load:
        self.told, forgotten, self.pages.forgotten = self.work, self.pages.forgotten, []
        return Load(self.told, self.places, forgotten)

    def add(self, sequence: Sequence) -> None:
        if sequence.end > self.pages.count * PAGE:
            raise ValueError(f"{sequence.end} tokens do not fit into {self.pages.count} pages of {PAGE}")
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that is complete, or that nobody waits for any more."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self.give_back(sequence)

    def plan(self) -> list[Row]:
        """The rows of the next step: those that decode, with one token each, then the chunk."""
        while self.waiting and len(self.running) < self.places and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for sequence in self.running.copy():
            while sequence in self.running and not self.grow(sequence):
                self.preempt(self.running[-1])
        decoding = [self.row(sequence, 1) for sequence in self.running if sequence.left == 1]
        prompts = [self.row(sequence, self.chunk) for sequence in self.running if sequence.left > 1]
        return decoding + prompts[:1]

    def row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.cached
        return Row(sequence, start, sequence.tokens[start : start + count], tuple(sequence.pages))

    def advance(self, row: Row, token: int) -> bool:
        """Take note of a computed row, and of the token that follows it; says whether its sequence has that token."""
        sequence = row.sequence
        sequence.imported, sequence.cached = None, row.start + len(row.tokens)
        for number in range(row.start // PAGE, sequence.cached // PAGE):
            self.pages.publish(sequence.tokens[: (number + 1) * PAGE], sequence.pages[number])
        if sequence.left > 0:
            return False
        sequence.tokens += bytes([token])
        if len(sequence.tokens) >= sequence.end:
            self.drop(sequence)
        return True

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence the pages for its tokens, if there are enough."""
        if sequence.imported is not None:
            sequence.cached = len(sequence.tokens) - 1
        else:
            sequence.pages = self.pages.begin(sequence.tokens)
            sequence.cached = len(sequence.pages) * PAGE
        if not self.grow(sequence):
            self.give_back(sequence)
            return False
        if sequence.imported is None:
            self.prompt_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.cached
        return True

    def grow(self, sequence: Sequence) -> bool:
        while len(sequence.pages) * PAGE < len(sequence.tokens):
            if (page := self.pages.take()) is None:
                return False
            sequence.pages.append(page)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take its pages for an older one. It keeps its tokens: their keys and values are computed again later."""
        self.running.remove(sequence)
        self.give_back(sequence)
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def give_back(self, sequence: Sequence) -> None:
        self.pages.give_back(reversed(sequence.pages))  # of a beginning, the end is the first to go
        sequence.pages, sequence.cached = [], 0
