"""The choice of the next prompt, and of its engine: the policies of `serve_router.py`. Engines push their loads."""

import math
import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serve_batch import Load
from serve_pages import PAGE

import aiodaft

WORTH = 16  # tokens of work that an engine may have more for each token of a beginning that it knows


@dataclass(frozen=True, eq=False)
class Prompt:
    tokens: bytes
    count: int  # tokens that are to follow
    tenant: str = ""

    @property
    def cost(self) -> int:
        return len(self.tokens) + self.count


@dataclass(eq=False)
class Member:
    """The router's view of an engine: its last load, and the prompts that the router has sent there since."""

    engine: Any
    role: str
    load: Load | None = None  # None: it does not run
    told: int = 0  # loads
    sent: int = 0  # the number of the last prompt
    since: dict[object, int] = field(default_factory=dict)  # prompts sent since the last load, and their work
    under_way: set[object] = field(default_factory=set)
    beginnings: set[bytes] = field(default_factory=set)

    @property
    def work(self) -> int:
        return (self.load.work if self.load else 0) + sum(self.since.values())

    @property
    def free(self) -> int:
        return (self.load.places if self.load else 0) - len(self.under_way)

    @property
    def process(self) -> object:
        return self.load and self.load.process

    def known(self, tokens: bytes) -> int:
        """The tokens at the beginning of a prompt whose keys and values it has."""
        ends = range(len(tokens) // PAGE * PAGE, 0, -PAGE)
        return next((end for end in ends if tokens[:end] in self.beginnings), 0)

    def take(self, load: Load) -> None:
        self.load, self.told = load, self.told + 1
        self.since.clear()
        self.beginnings.difference_update(load.forgotten)

    def lose(self) -> None:
        self.load = None
        self.since.clear()
        self.beginnings.clear()

    @contextmanager
    def sending(self, tokens: bytes, work: int, number: int) -> Generator[None]:
        """The time that a prompt is there."""
        self.sent, key = number, object()
        self.since[key] = work
        self.under_way.add(key)
        self.beginnings.update(tokens[:end] for end in range(PAGE, len(tokens) + 1, PAGE))
        try:
            yield
        finally:
            self.since.pop(key, None)
            self.under_way.discard(key)


# The choice of an engine for a prompt.
Policy = Callable[[Prompt, Sequence[Member]], Awaitable[Member]]


async def round_robin(prompt: Prompt, members: Sequence[Member]) -> Member:
    return min(members, key=lambda member: member.sent)


async def least_work(prompt: Prompt, members: Sequence[Member]) -> Member:
    return min(members, key=lambda member: member.work)


async def two_choices(prompt: Prompt, members: Sequence[Member]) -> Member:
    """The one with less work of two at random. Loads are old by the time of a push, and differ for each router."""
    return await least_work(prompt, random.sample(members, min(2, len(members))))


async def prefix_locality(prompt: Prompt, members: Sequence[Member]) -> Member:
    """The one that knows most of the beginning, unless it is too busy. It then knows still more such."""
    return min(members, key=lambda member: member.work - WORTH * member.known(prompt.tokens))


class Turns:
    """Deficit-fair turns: tenants that wait get equal numbers of tokens; the prompts of one come in their order.

    A prompt is paid from the credit of its tenant when it begins. The first one whose tenant has credit is next; when
    no tenant that waits has any, all of them get `quantum`. So while a prompt is the first of its tenant, each other
    tenant gets at most 2 * (quantum + the cost of the largest prompt) tokens.
    """

    def __init__(self, quantum: float = math.inf, most: int = 64) -> None:
        self.quantum, self.most = quantum, most
        self.waiting: list[Prompt] = []
        self.credit: dict[str, float] = {}

    def enter(self, prompt: Prompt) -> None:
        if len(self.waiting) >= self.most:
            raise aiodaft.Overloaded(f"{len(self.waiting)} prompts wait, as many as may: come back later")
        self.waiting.append(prompt)
        self.credit.setdefault(prompt.tenant, 0)

    def next(self) -> Prompt:
        while True:
            for prompt in self.waiting:
                if self.credit[prompt.tenant] > 0:
                    return prompt
            for tenant in {prompt.tenant for prompt in self.waiting}:
                self.credit[tenant] += self.quantum

    def pay(self, prompt: Prompt) -> None:
        self.credit[prompt.tenant] -= prompt.cost

    def leave(self, prompt: Prompt) -> None:
        self.waiting.remove(prompt)
        if not self.waiting:
            self.credit.clear()
