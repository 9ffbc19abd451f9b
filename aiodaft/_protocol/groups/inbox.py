"""The unreceived messages of one group member: the choice of those that fit, and of a receive for each. Pure.

A message goes through these stages; only its announcement comes at once, its value when it is admitted:

    Stage     | event                                           | next
    ANNOUNCED | there is room, or a receive waits for it        | ADMITTED: its value may come
    ADMITTED  | `came`                                          | HERE
    HERE      | a receive that wants it                         | given
    not HERE  | `withdraw`: its sender gave up or is gone       | gone

Of the messages of one sender that a receive wants, it gets the one that was announced first, also if the value of a
later one is here earlier: messages do not overtake (MPI 4.0, section 3.5).

A message, and a receive, may be within something that others share, such as one call of a group: then it meets only
messages and receives within the same, and those that are in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from enum import Enum, auto
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from aiodaft._protocol.ids import ActorId
from aiodaft.exceptions import LocalProtocolError

Tag: TypeAlias = int | str

MESSAGES: Final = 1024
BYTES: Final = 1 << 28
_NUMBER: Final = attrgetter("number")

_Line: TypeAlias = tuple[ActorId, Hashable]

K = TypeVar("K")
OneT = TypeVar("OneT", "Message", "Receive")


class Stage(Enum):
    ANNOUNCED = auto()
    ADMITTED = auto()
    HERE = auto()


class Message:
    __slots__ = ("nbytes", "number", "source", "stage", "tag", "value", "waiter", "within")

    def __init__(self, number: int, source: ActorId, tag: Tag, nbytes: int, within: Hashable) -> None:
        self.number = number
        self.source = source
        self.tag = tag
        self.nbytes = nbytes
        self.within = within
        self.stage = Stage.ANNOUNCED
        self.value: Any = None
        self.waiter: Any = None


class Wish(NamedTuple):
    """None: for any sender, for any tag, within nothing."""

    source: ActorId | None
    tag: Tag | None
    within: Hashable = None


class Receive:
    __slots__ = ("number", "senders", "waiter", "wish")

    def __init__(self, number: int, wish: Wish, senders: Iterable[ActorId]) -> None:
        self.number = number
        self.wish = wish
        # The members that may still send such a message; it ends when the last of them is gone.
        self.senders = set(senders)
        self.waiter: Any = None


class Admit(NamedTuple):
    message: Message


class Give(NamedTuple):
    receive: Receive
    message: Message


Command: TypeAlias = Admit | Give


class Inbox:
    """The messages to one member, and its receives.

    Messages fit up to a number and a number of bytes. Others wait in the order of announcement, but for two kinds that
    are admitted at once: a message that a receive waits for, and the first message of a sender that has none here
    within the same. So a receive never waits for room, and two members may send each other one message of any size
    before they receive.
    """

    def __init__(self, messages: int = MESSAGES, nbytes: int = BYTES) -> None:
        self._most, self._most_bytes = messages, nbytes
        self._count = 0
        self._sent: dict[ActorId, dict[int, Message]] = {}
        self._tagged: dict[tuple[ActorId, Tag], dict[int, Message]] = {}
        self._announced: dict[_Line, dict[int, Message]] = {}
        self._admitted: Counter[_Line] = Counter()
        self.admitted = 0
        self.nbytes = 0
        self._waiting: dict[Wish, dict[int, Receive]] = {}
        self._withins: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._sent.values()))

    @property
    def waiting(self) -> list[Receive]:
        return sorted((one for some in self._waiting.values() for one in some.values()), key=_NUMBER)

    @property
    def messages(self) -> list[Message]:
        return sorted((one for sent in self._sent.values() for one in sent.values()), key=_NUMBER)

    def limit(self, messages: int, nbytes: int) -> list[Command]:
        self._most, self._most_bytes = messages, nbytes
        return self._admit_more()

    def announce(
        self, source: ActorId, tag: Tag, nbytes: int, within: Hashable = None
    ) -> tuple[Message, list[Command]]:
        message = Message(self._next(), source, tag, nbytes, within)
        self._insert(message)
        line = source, within
        self._announced.setdefault(line, {})[message.number] = message
        wanted = bool(self._waiting) and self._receive_for(message) is not None
        return message, [self._admit(message)] if wanted else self._admit_more(line)

    def came(self, message: Message, value: Any) -> list[Command]:
        if message.stage is not Stage.ADMITTED:
            raise LocalProtocolError("the value of a message came twice, or before it was admitted")
        message.stage, message.value = Stage.HERE, value
        return self._serve(message)

    def withdraw(self, message: Message) -> list[Command]:
        if message.stage is Stage.HERE:
            return []
        return self._after_removal(message)

    def ask(self, wish: Wish, senders: Iterable[ActorId]) -> tuple[Receive, list[Command]]:
        receive = Receive(self._next(), wish, senders)
        here = [message for message in self._heads(wish) if message.stage is Stage.HERE]
        if here:
            message = min(here, key=_NUMBER)
            return receive, [Give(receive, message), *self._after_removal(message)]
        self._waiting.setdefault(wish, {})[receive.number] = receive
        self._withins[wish.within] += 1
        return receive, self._let_one_come(wish)

    def give_up(self, receive: Receive) -> None:
        if receive.number in self._waiting.get(receive.wish, ()):
            self._stop_waiting(receive)

    def put_back(self, message: Message) -> list[Command]:
        self._insert(message)
        self._note_admitted(message)
        return self._serve(message)

    def lose(self, source: ActorId) -> list[Receive]:
        """Returns the receives that wait for no other sender.

        Messages already received from it can still be read.
        """
        ended: list[Receive] = []
        for receive in self.waiting:
            if source in receive.senders:
                receive.senders.remove(source)
                if not receive.senders:
                    self._stop_waiting(receive)
                    ended.append(receive)
        return ended

    def _heads(self, wish: Wish) -> list[Message]:
        sources = self._sent if wish.source is None else (wish.source,)
        lines = (self._sent.get(one) if wish.tag is None else self._tagged.get((one, wish.tag)) for one in sources)
        return [head for line in lines if (head := _first(line, wish.within)) is not None]

    def _receive_for(self, message: Message) -> Receive | None:
        """The first one that wants the message before all others of its sender."""
        source, tag = message.source, message.tag
        wishes: list[Wish] = []
        for within in self._withins if message.within is None else {message.within, None}:
            if _first(self._tagged[source, tag], within) is message:
                wishes += [Wish(source, tag, within), Wish(None, tag, within)]
            if _first(self._sent[source], within) is message:
                wishes += [Wish(source, None, within), Wish(None, None, within)]
        found = [next(iter(some.values())) for wish in wishes if (some := self._waiting.get(wish))]
        return min(found, key=_NUMBER, default=None)

    def _let_one_come(self, wish: Wish) -> list[Command]:
        """If receives wait for such a message, and none like it is on its way, admit one."""
        heads = self._heads(wish) if wish in self._waiting else []
        if not heads or any(message.stage is not Stage.ANNOUNCED for message in heads):
            return []
        return [self._admit(min(heads, key=_NUMBER))]

    def _serve(self, message: Message) -> list[Command]:
        receive = self._receive_for(message) if self._waiting else None
        if receive is None or message.stage is Stage.ADMITTED:
            return []
        if message.stage is Stage.ANNOUNCED:
            return [self._admit(message)]
        self._stop_waiting(receive)
        return [Give(receive, message), *self._after_removal(message)]

    def _after_removal(self, message: Message) -> list[Command]:
        source, tag = message.source, message.tag
        own = source, message.within
        _discard(self._sent, source, message)
        _discard(self._tagged, (source, tag), message)
        if message.stage is not Stage.ANNOUNCED:
            self.nbytes -= message.nbytes
            self.admitted -= 1
            self._admitted[own] -= 1
            if not self._admitted[own]:
                del self._admitted[own]
        else:
            _discard(self._announced, own, message)
        commands: list[Command] = []
        for within in list(self._withins):
            # Serving one removes it, and may remove more.
            for wish in (Wish(source, tag, within), Wish(source, None, within)):
                for head in self._heads(wish):
                    commands += self._serve(head)
            # A receive from any sender may have waited for this message: one of another sender may come.
            for wish in (Wish(None, tag, within), Wish(None, None, within)):
                commands += self._let_one_come(wish)
        return commands + self._admit_more(own)

    def _admit_more(self, freed: _Line | None = None) -> list[Command]:
        commands: list[Command] = []
        while self._announced:
            waiting = [next(iter(some.values())) for some in self._announced.values()]
            first = min(waiting, key=_NUMBER)
            if not self._fits(first):
                break
            commands.append(self._admit(first))
        # Behind that one: the first of each line that has none here.
        lines = self._announced if freed is None else self._announced.keys() & {freed}
        firsts = [next(iter(self._announced[line].values())) for line in lines if not self._admitted[line]]
        return [*commands, *map(self._admit, firsts)]

    def _fits(self, message: Message) -> bool:
        return self.admitted < self._most and self.nbytes + message.nbytes <= self._most_bytes

    def _admit(self, message: Message) -> Admit:
        _discard(self._announced, (message.source, message.within), message)
        message.stage = Stage.ADMITTED
        self._note_admitted(message)
        return Admit(message)

    def _note_admitted(self, message: Message) -> None:
        self.nbytes += message.nbytes
        self.admitted += 1
        self._admitted[message.source, message.within] += 1

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _insert(self, message: Message) -> None:
        _enter(self._sent, message.source, message)
        _enter(self._tagged, (message.source, message.tag), message)

    def _stop_waiting(self, receive: Receive) -> None:
        _discard(self._waiting, receive.wish, receive)
        within = receive.wish.within
        self._withins[within] -= 1
        if not self._withins[within]:
            del self._withins[within]


def _first(line: dict[int, Message] | None, within: Hashable) -> Message | None:
    meets = {None, within}
    return next((one for one in (line or {}).values() if within is None or one.within in meets), None)


def _enter(table: dict[K, dict[int, Message]], key: K, message: Message) -> None:
    line = table.setdefault(key, {})
    is_last = not line or next(reversed(line)) < message.number
    line[message.number] = message
    if not is_last:
        table[key] = dict(sorted(line.items()))


def _discard(table: dict[K, dict[int, OneT]], key: K, one: OneT) -> None:
    line = table[key]
    del line[one.number]
    if not line:
        del table[key]
