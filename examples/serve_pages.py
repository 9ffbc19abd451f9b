"""The pages of an engine's memory, and the sequences that have them; for `serve_batch.py`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PAGE = 16  # tokens whose keys and values lie in one page of memory


class Pages:
    """The free pages, and the others. Full ones stay known by their text until a sequence needs the room."""

    def __init__(self, count: int) -> None:
        self.count, self.free, self.users = count, list(range(count)), [0] * count
        self.known: dict[bytes, int] = {}  # text from the beginning to the end of the page
        self.texts: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # known and without users, the longest unused first
        self.forgotten: list[bytes] = []

    @property
    def in_use(self) -> int:
        return self.count - len(self.free) - len(self.idle)

    def begin(self, tokens: bytes) -> list[int]:
        """Take the known pages of a beginning, without the last token: a step has to compute its successor."""
        found = []
        for end in range(PAGE, len(tokens), PAGE):
            if (page := self.known.get(tokens[:end])) is None:
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
            self.forgotten.append(text := self.texts.pop(page))
            del self.known[text]
        else:
            return None
        self.users[page] = 1
        return page

    def publish(self, text: bytes, page: int) -> None:
        if text not in self.known:
            self.known[text], self.texts[page] = page, text

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0 and page in self.texts:
                self.idle[page] = None
            elif self.users[page] == 0:
                self.free.append(page)


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that follow.

    Attributes:
        tokens: All of them.
        end: The length at which it is complete.
        cached: The tokens that have keys and values in its pages.
        imported: Keys and values that another engine has computed for all tokens but the last, to be written there.
        exports: Whether its keys and values are to go to another engine once the prompt is computed.
        by_layer: Whether each layer is to go as soon as it is computed.
    """

    tokens: bytes
    end: int
    imported: Any = None
    exports: bool = False
    by_layer: bool = False
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens to compute before the next one is known: 1 while it decodes."""
        return len(self.tokens) - self.cached
