"""The tokens that the next step of an engine computes, and the pages of memory for their keys and values.

Decisions only: nothing here computes or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiodaft.serve.engine import PAGE, Load, Request, page_keys

_NEWS: Final = 256  # tokens


class Pages:
    """Full pages stay known by their keys until a sequence needs the room."""

    def __init__(self, count: int) -> None:
        self.count, self.free, self.users = count, list(range(count)), [0] * count
        self.known: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # known and without users, the longest unused first
        self.forgotten: list[bytes] = []

    @property
    def in_use(self) -> int:
        return self.count - len(self.free) - len(self.idle)

    def begin(self, keys: Iterable[bytes]) -> list[int]:
        found = []
        for key in keys:
            if (page := self.known.get(key)) is None:
                break
            self.idle.pop(page, None)
            self.users[page] += 1
            found.append(page)
        return found

    def take(self) -> int | None:
        if self.free:
            page = self.free.pop()
        elif self.idle:
            page = next(iter(self.idle))
            del self.idle[page]
            self.forgotten.append(key := self.keys.pop(page))
            del self.known[key]
        else:
            return None
        self.users[page] = 1
        return page

    def publish(self, key: bytes, page: int) -> None:
        if key not in self.known:
            self.known[key], self.keys[page] = page, key

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0 and page in self.keys:
                self.idle[page] = None
            elif self.users[page] == 0:
                self.free.append(page)


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that follow.

    Attributes:
        end: The length at which it is complete.
        imported: Keys and values of its first `ready` tokens, from another engine: parts, and where each begins.
        exports: Whether its keys and values go to another engine once the prompt is computed.
        by_layer: Whether each layer goes as soon as it is computed.
        cached: The tokens that have keys and values in its pages.
        keys: Those of its full pages, as far as they are computed.
        published: The first pages of it that others may use.
    """

    tokens: list[int]
    end: int
    request: Request
    imported: list[tuple[int, Any]] = field(default_factory=list)
    ready: int = 0
    exports: bool = False
    by_layer: bool = False
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    complete: bool = False

    @property
    def left(self) -> int:
        return len(self.tokens) - self.cached


class Row(NamedTuple):
    """Tokens of one sequence for one step. `pages` is a copy: the sequence may lose its own during the step."""

    sequence: Sequence
    start: int
    tokens: list[int]
    pages: tuple[int, ...]
    is_last: bool


class Sizes(NamedTuple):
    """Of an engine: pages of memory, of 16 tokens each; sequences at a time; tokens of a prompt in one step."""

    pages: int = 256
    places: int = 16
    chunk: int = 32


class Batch:
    """The sequences of an engine. A step computes the next token of all that decode, and a chunk of one prompt."""

    def __init__(self, sizes: Sizes) -> None:
        self.pages, self.places, self.chunk = Pages(sizes.pages), sizes.places, sizes.chunk
        self.waiting, self.running = deque[Sequence](), list[Sequence]()  # the oldest first
        self.preempted = self.prompt_tokens = self.hit_tokens = self.told = self.told_prompts = 0

    @property
    def work(self) -> int:
        return sum(sequence.end - sequence.cached for sequence in (*self.waiting, *self.running))

    @property
    def has_news(self) -> bool:
        work, prompts = self.work, self.prompt_tokens - self.told_prompts
        if not work:  # a load that stays has the state of now
            return bool(self.told or prompts)
        return max(abs(work - self.told) + PAGE * len(self.pages.forgotten), prompts) >= _NEWS

    def load(self) -> Load:
        self.told, self.told_prompts = self.work, self.prompt_tokens
        forgotten, self.pages.forgotten = self.pages.forgotten, []
        return Load(
            self.places,
            self.told,
            forgotten,
            usage=self.pages.in_use / self.pages.count,
            asked=self.prompt_tokens,
            hits=self.hit_tokens,
            preempted=self.preempted,
        )

    def add(self, sequence: Sequence) -> None:
        if sequence.end > self.pages.count * PAGE:
            raise ValueError(f"{sequence.end} tokens do not fit into {self.pages.count} pages of {PAGE}")
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.hold(sequence)
        self.give_back(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Compute no more of it; it keeps its pages until `give_back`."""
        for sequences in (self.waiting, self.running):
            if sequence in sequences:
                sequences.remove(sequence)

    def plan(self) -> list[Row]:
        """The rows of the next step: those that decode, with one token each, then the chunk."""
        while self.waiting and len(self.running) < self.places and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for sequence in self.running.copy():
            while sequence in self.running and not self._grow(sequence):
                self._preempt(self.running[-1])
        decoding = [self._row(sequence, 1) for sequence in self.running if sequence.left == 1]
        prompts = [self._row(sequence, self.chunk) for sequence in self.running if sequence.left > 1]
        return decoding + prompts[:1]

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.cached
        return Row(
            sequence, start, sequence.tokens[start : start + count], tuple(sequence.pages), count >= sequence.left
        )

    def advance(self, row: Row, token: int) -> bool:
        """Take note of a computed row; says whether the token that follows it is one of its sequence."""
        sequence = row.sequence
        sequence.imported, sequence.cached = [], row.start + len(row.tokens)
        if (full := sequence.cached // PAGE) > sequence.published:
            sequence.keys = page_keys(sequence.tokens, sequence.keys)
            for number in range(sequence.published, full):
                self.pages.publish(sequence.keys[number], sequence.pages[number])
            sequence.published = full
        if sequence.left > 0:
            return False
        sequence.tokens.append(token)
        sequence.complete = len(sequence.tokens) >= sequence.end or token in sequence.request.stops
        if sequence.complete:
            self.drop(sequence)
        return True

    def _admit(self, sequence: Sequence) -> bool:
        if sequence.imported:
            sequence.cached = sequence.ready
        else:
            # Without the last token: a step has to compute its successor.
            sequence.keys = page_keys(sequence.tokens, sequence.keys)
            sequence.pages = self.pages.begin(sequence.keys[: (len(sequence.tokens) - 1) // PAGE])
            sequence.published = len(sequence.pages)
            sequence.cached = sequence.published * PAGE
        if not self._grow(sequence):
            self.give_back(sequence)
            return False
        if not sequence.imported:
            self.prompt_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.cached
        return True

    def _grow(self, sequence: Sequence) -> bool:
        while len(sequence.pages) * PAGE < len(sequence.tokens):
            if (page := self.pages.take()) is None:
                return False
            sequence.pages.append(page)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take its pages for an older one. It keeps its tokens, and is computed again later."""
        self.running.remove(sequence)
        self.give_back(sequence)
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def give_back(self, sequence: Sequence) -> None:
        self.pages.give_back(reversed(sequence.pages))  # of a beginning, the end is the first to go
        sequence.pages, sequence.published, sequence.cached = [], 0, 0
