"""Pulls of values, and broadcasts: a value reaches many processes, and its producer sends it only twice. Pure.

Each process that pulls the value from its producer, the root, joins the broadcast. The root sends the value to the
first two. To each later one it names the member that can finish one more copy first. Processes that ask at the same
time form a binomial tree, in which no member sends more often than the root. A member leaves once it has the value and
no copy for others. Only the second one keeps a copy without a request, for processes that ask after all others have
left, or that were sent to one that had just left.

Between machines, the first process of each machine keeps a copy in shared memory, which every later process there
reads: the network of a machine carries the value once.

    root                      consumer                         relay (an earlier consumer)
     | <------- PULL ----------- |                                |
     | -------- JOIN ----------> |  member                        |
     | -------- MOVED (relay) -> |                                |
     |                           | ----------- PULL ------------> |
     |                           | <---------- VALUE ------------ |
     | <------- LEAVE ---------- |  has no copy for others        |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

from aiodaft._protocol.ids import PeerId, can_share_memory, is_attached
from aiodaft._protocol.objects.value import Key
from aiodaft.exceptions import OwnerDied, RemoteProtocolError

WaiterT = TypeVar("WaiterT")

# The number of times that the root sends a value, and that each member does if they ask at the same time.
SENDS: Final = 2
PATIENCE: Final = 2


@dataclass(slots=True)
class _Member:
    # The relay that it gets the value from; None for the root.
    source: PeerId | None = None
    # The time at which it has the value, in units of one transfer, and the number of members that it sends to.
    ready: int = 0
    given: int = 0
    # The root names it to no more members; earlier ones may still wait for it.
    failing: bool = False
    # Its relay failed.
    let_down: bool = False
    disappointments: int = 0
    # It reads the block of another process of its machine, and has none for others.
    is_reader: bool = False
    # It keeps a copy although no process waits for it.
    keeps: bool = False


class Fanout:
    """The root's table of members that get one value or pass it on.

    Args:
        shared: The processes of a machine read one block; those of the root's own machine do not join then.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._members: dict[PeerId, _Member] = {}
        self.sent = 0

    @property
    def members(self) -> list[PeerId]:
        return list(self._members)

    def join(self, peer: PeerId) -> PeerId | None:
        """The relay that gives the value to `peer`; None for the root; `peer` itself if it is getting it already."""
        member = self._members.get(peer)
        if member is None:
            member = _Member()
        elif not member.let_down:
            return peer
        member.let_down = False
        keeper = self._keeper_for(peer) if member.disappointments < PATIENCE else None
        member.is_reader = keeper is not None
        member.keeps = False
        if keeper is not None:
            member.source = keeper
            self._members[peer] = member
            return keeper
        disappointments = member.disappointments
        asks_relay = self.sent >= SENDS and disappointments < PATIENCE
        member.source = self._relay_for(peer, let_down=disappointments > 0) if asks_relay else None
        if member.source is None:
            self.sent += 1
            member.ready = self.sent
        else:
            source = self._members[member.source]
            source.given += 1
            member.ready = source.ready + source.given
        member.keeps = self._has_to_keep(peer, member)
        self._members[peer] = member
        return member.source

    def keeps(self, peer: PeerId) -> bool:
        return self._members[peer].keeps

    def leave(self, peer: PeerId) -> None:
        """The process has no copy for others, and no process waits for it."""
        self._members.pop(peer, None)

    def fail(self, peer: PeerId, relay: PeerId) -> None:
        if relay in self._members:
            self._members[relay].failing = True
        member = self._members.get(peer)
        if member is not None:
            member.let_down = True
            member.disappointments += 1

    def _has_to_keep(self, peer: PeerId, member: _Member) -> bool:
        return (self._shared and not is_attached(peer)) or (member.source is None and self.sent >= SENDS)

    def _relay_for(self, peer: PeerId, *, let_down: bool) -> PeerId | None:
        able = self._able(peer)

        def done(name: PeerId) -> tuple[bool, bool, int, int]:
            member = self._members[name]
            # Of two relays both may just have left. One that keeps its copy is sure to have it.
            return let_down and not member.keeps, member.given >= SENDS, member.ready + member.given + 1, member.given

        return min(able, key=done, default=None)

    def _keeper_for(self, peer: PeerId) -> PeerId | None:
        if not self._shared:
            return None
        return next((name for name in self._able(peer) if can_share_memory(name, peer)), None)

    def _able(self, peer: PeerId) -> list[PeerId]:
        return [
            name
            for name, member in self._members.items()
            if not (member.failing or member.is_reader or self._waits_for(name, peer))
        ]

    def _waits_for(self, name: PeerId | None, peer: PeerId) -> bool:
        """Directly or not: such a process cannot be the relay of `peer`."""
        while name is not None and name != peer:
            member = self._members.get(name)
            name = None if member is None else member.source
        return name == peer


class Part(Enum):
    ALONE = "it pulls the value; the root sends no other process here"
    MEMBER = "other processes may be sent here: a copy is made if one comes before the value does"
    KEEPER = "the root wants a copy here in any case"


class Event(Enum):
    JOIN = "the root counts this process as a member"
    JOIN_TO_KEEP = "the root wants a copy here"
    ROOT_LEFT = "the root has freed the value, or ended"


_PARTS: Final = {
    (Part.ALONE, Event.JOIN): Part.MEMBER,
    (Part.ALONE, Event.JOIN_TO_KEEP): Part.KEEPER,
    (Part.ALONE, Event.ROOT_LEFT): Part.ALONE,
    (Part.MEMBER, Event.JOIN): Part.MEMBER,
    (Part.MEMBER, Event.JOIN_TO_KEEP): Part.KEEPER,
    (Part.MEMBER, Event.ROOT_LEFT): Part.ALONE,
    (Part.KEEPER, Event.JOIN): Part.KEEPER,
    (Part.KEEPER, Event.JOIN_TO_KEEP): Part.KEEPER,
    (Part.KEEPER, Event.ROOT_LEFT): Part.ALONE,
}


class Fetching(Generic[WaiterT]):
    """One value that this process fetches, for one or several pulls; `waiting`: processes that were sent here."""

    def __init__(self) -> None:
        self.root: PeerId | None = None
        self.pulls = 0
        self._part = Part.ALONE
        self.waiting: list[WaiterT] = []

    def joined(self, root: PeerId, *, keep: bool) -> None:
        self.root = root
        self._part = _PARTS[self._part, Event.JOIN_TO_KEEP if keep else Event.JOIN]

    def left_by(self, peer: PeerId) -> None:
        if peer == self.root:
            self.root = None
            self._part = _PARTS[self._part, Event.ROOT_LEFT]

    def take_waiting(self) -> list[WaiterT]:
        waiting, self.waiting = self.waiting, []
        return waiting

    @property
    def is_alone(self) -> bool:
        return self._part is Part.ALONE

    @property
    def wants_copy(self) -> bool:
        return self._part is Part.KEEPER or (self._part is Part.MEMBER and bool(self.waiting))


class Broadcasts(Generic[WaiterT]):
    """The broadcasts that one process takes part in, as the root or as a consumer."""

    def __init__(self) -> None:
        self.fanouts: dict[Key, Fanout] = {}
        self.fetching: dict[Key, Fetching[WaiterT]] = {}

    def begin(self, key: Key) -> Fetching[WaiterT]:
        fetching = self.fetching.setdefault(key, Fetching())
        fetching.pulls += 1
        return fetching

    def end(self, key: Key) -> bool:
        fetching = self.fetching[key]
        fetching.pulls -= 1
        if fetching.pulls:
            return False
        del self.fetching[key]
        return True

    def wait(self, key: Key, waiter: WaiterT) -> bool:
        """False if the value is not on its way."""
        fetching = self.fetching.get(key)
        if fetching is None:
            return False
        fetching.waiting.append(waiter)
        return True

    def joined(self, key: Key, root: PeerId, *, keep: bool) -> bool:
        """False if the value is not wanted here any more."""
        fetching = self.fetching.get(key)
        if fetching is None:
            return False
        fetching.joined(root, keep=keep)
        return True

    def left(self, key: Key, remote: PeerId, member: PeerId) -> bool:
        """LEAVE came. Returns whether from the root, which has freed the value: a copy is to go."""
        fanout, fetching = self.fanouts.get(key), self.fetching.get(key)
        if fanout is not None and member == remote:
            fanout.leave(member)
        elif fanout is not None:
            fanout.fail(remote, member)
        elif fetching is not None:
            fetching.left_by(remote)
        return fanout is None

    def lost(self, remote: PeerId) -> None:
        for fanout in self.fanouts.values():
            fanout.leave(remote)
        for fetching in self.fetching.values():
            fetching.left_by(remote)


KeyT = TypeVar("KeyT")

# Longer routes are circles: owner, producer, and two relays, each with the root asked again.
MAX_HOPS: Final = 16


class Asked(Enum):
    HERE = "the process that pulls"
    REMOTE = "another process"
    RELAY = "a consumer that the root of a broadcast named"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Answer(Enum):
    MOVED = "the name of another process"
    BROKEN = "an error"
    LOST = "the asked process ended"
    OWNER_LOST = "the asked process ended, and it was the owner"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Next(Enum):
    ASK_NAMED = "ask the process that the answer names"
    ASK_OWNER = "ask the owner"
    ASK_ROOT = "report the relay to the root, and ask the root again"
    FAIL = "fail with the error"


_NEXT: Final = {
    (Asked.HERE, Answer.MOVED): Next.ASK_NAMED,
    (Asked.HERE, Answer.BROKEN): Next.FAIL,
    (Asked.REMOTE, Answer.MOVED): Next.ASK_NAMED,
    (Asked.REMOTE, Answer.BROKEN): Next.FAIL,
    # The owner may have the value, and knows how the producer ended.
    (Asked.REMOTE, Answer.LOST): Next.ASK_OWNER,
    (Asked.REMOTE, Answer.OWNER_LOST): Next.FAIL,
    (Asked.RELAY, Answer.MOVED): Next.ASK_ROOT,
    (Asked.RELAY, Answer.BROKEN): Next.ASK_ROOT,
    (Asked.RELAY, Answer.LOST): Next.ASK_ROOT,
    (Asked.RELAY, Answer.OWNER_LOST): Next.FAIL,
}


class Pull:
    """One pull of one value: the process to ask for it, and the next one.

        producer  --MOVED-->  owner   the producer does not know the value; the owner always knows
        owner     --MOVED-->  producer, or the process that pulls
        root      --MOVED-->  relay   the producer broadcasts the value; the relay is a consumer

    A relay that gives nothing is reported to the root, which is then asked again and names another process.
    """

    def __init__(self, local: PeerId, key: Key, first: PeerId) -> None:
        self._local = local
        self._owner, self._number = key
        self.asked = first
        self._named_by: PeerId | None = None
        self._hops = 0
        # Why a process that was asked gave nothing: its connection breaks again and again, if the route is a circle.
        self._problem: BaseException | None = None

    def handle(self, answer: PeerId | BaseException, root: PeerId | None, *, lost: bool = False) -> PeerId | None:
        """Choose the process to ask next.

        Args:
            answer: The process that the asked one names, or the error.
            root: The root of the broadcast that this process takes part in for the value.

        Returns:
            The relay that gave nothing, to be reported to the root, which is asked next.

        Raises:
            RemoteProtocolError: The route is a circle.
            OwnerDied: The owner is lost.
            BaseException: The error, if no other process is to be asked.
        """
        asked = self.asked
        if asked == self._local:
            kind = Asked.HERE
        else:
            kind = Asked.RELAY if root is not None and root == self._named_by else Asked.REMOTE
        step = _NEXT[kind, self._kind_of(answer, lost)]
        self._hops += 1
        if isinstance(answer, BaseException):
            if step is Next.FAIL and lost and asked == self._owner:
                raise OwnerDied(f"the owner of a ref, {asked}, is gone: {answer}") from answer
            if step is Next.FAIL:
                raise answer
            self._problem = answer
        if self._hops == MAX_HOPS:
            raise self._problem or RemoteProtocolError(
                f"no process has the value of ref {self._number} of {self._owner}"
            )
        if step is Next.ASK_ROOT:
            assert root is not None
            self.asked, self._named_by = root, None
            return asked
        self._named_by = None if kind is Asked.HERE else asked
        self.asked = self._owner if isinstance(answer, BaseException) else answer
        return None

    def _kind_of(self, answer: PeerId | BaseException, lost: bool) -> Answer:
        if not isinstance(answer, BaseException):
            return Answer.MOVED
        if lost and self.asked == self._owner:
            return Answer.OWNER_LOST
        # If this process owns the ref, no other process knows more.
        return Answer.LOST if lost and self._owner != self._local else Answer.BROKEN


class Questions(Generic[WaiterT]):
    """A process answers the pulls of one value in their order."""

    def __init__(self) -> None:
        self.open: dict[tuple[PeerId, Key], deque[WaiterT]] = {}

    def ask(self, remote: PeerId, key: Key, waiter: WaiterT) -> None:
        self.open.setdefault((remote, key), deque()).append(waiter)

    def asked(self, remote: PeerId, key: Key) -> bool:
        return (remote, key) in self.open

    def answered(self, remote: PeerId, key: Key) -> WaiterT:
        if not self.asked(remote, key):
            raise RemoteProtocolError(f"{remote} answers a pull that was not made")
        return take_first(self.open, (remote, key))

    def lost(self, remote: PeerId) -> list[WaiterT]:
        asked = [question for question in self.open if question[0] == remote]
        return [waiter for question in asked for waiter in self.open.pop(question)]


def take_first(table: dict[KeyT, deque[WaiterT]], key: KeyT) -> WaiterT:
    waiting = table[key]
    first = waiting.popleft()
    if not waiting:
        del table[key]
    return first
