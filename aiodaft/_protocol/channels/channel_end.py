"""A process's sends and receives of a channel as a state machine: messages in, messages and outcomes out. Pure.

One receive at a time goes through these states:

    Want       | event                  | next       | says
    IDLE       | receive                | ASKED      | WANT
    ASKED      | ITEM                   | LENT       | outcome of `receive`: the item, which is not the user's yet
    ASKED      | stop                   | IDLE       | UNWANT
    LENT       | confirm                | CONFIRMING | GOT
    LENT       | stop                   | IDLE       | UNWANT
    CONFIRMING | YOURS                  | OWNED      | outcome of `confirm`
    CONFIRMING | stop                   | RETURNING  |
    RETURNING  | YOURS                  | IDLE       | BACK (and WANT, if the user receives again: ASKED)
    OWNED      | took                   | IDLE       |
    OWNED      | stop                   | IDLE       | BACK
    any        | OVER, ORPHANED, LOST   | IDLE       | outcome: no item will come
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Any, Final

from aiodaft._protocol.channels.channel import (
    FOR_KEEPERS,
    ChannelId,
    Command,
    Keeper,
    Kind,
    Leaving,
    Message,
    Outcome,
    Settle,
    Tell,
    refusal,
)
from aiodaft._protocol.ids import PeerId

_ENDINGS: Final = {Kind.OVER: Outcome.CLOSED, Kind.ORPHANED: Outcome.ORPHANED, Kind.LOST: Outcome.LOST}


class Want(Enum):
    IDLE = auto()
    ASKED = auto()
    LENT = auto()
    CONFIRMING = auto()
    RETURNING = auto()
    OWNED = auto()


class End:
    """One process's sends and receives of one channel: one receive at a time, any number of sends and closes.

    Each has a ticket, a number that the process never uses again: a late answer must not meet another request.

    Several users of one process share its end, say two actors, and each has a `Channel` object of its own. A user may
    send unless it has received and not sent, and a process may send if one of its users may.
    """

    def __init__(self, keeper: PeerId) -> None:
        self.keeper = keeper
        self.is_lost = False
        # Users that may send, and whether the keeper was last told that there are any.
        self.senders = 0
        self.was_handed_on = False
        self._said_may_send: bool | None = None
        self.is_alone = False
        # The maker is gone: tell the keeper when the channel is dropped here.
        self._is_counted = False
        self._offers: dict[int, Any] = {}
        self._want = Want.IDLE
        self._want_ticket = 0
        # The process that was asked, for each unanswered request, by ticket.
        self._asked: dict[int, PeerId] = {}
        # The item that is lent, or owned and not yet taken.
        self._item: Any = None
        # The ticket of a receive that began while an item was on its way back.
        self._next_want: int | None = None
        self._closes: set[int] = set()
        self._close_again = False

    @property
    def is_idle(self) -> bool:
        return not self._offers and self._want is Want.IDLE and not self._closes

    @property
    def may_send(self) -> bool:
        return self.senders > 0

    def say_whether_it_may_send(self) -> list[Command]:
        """To be called after each change."""
        may_send, commands = self.may_send, list[Command]()
        if self._said_may_send not in {None, may_send}:
            self._said_may_send = may_send
            commands += self._say(Kind.MAY_SEND, 0, may_send)
        # An end that was handed on once may be handed on again.
        if self.is_alone and not may_send and not self.was_handed_on:
            commands += self._say(Kind.FINISH, 0)
        return commands

    def send(self, ticket: int, item: Any) -> list[Command]:
        self._offers[ticket] = item
        return self._ask(Kind.OFFER, ticket, item)

    def stop_sending(self, ticket: int) -> list[Command]:
        if ticket not in self._offers:
            return []
        del self._offers[ticket]
        return [Tell(self._asked.pop(ticket), Message(Kind.WITHDRAW, ticket))]

    def receive(self, ticket: int) -> list[Command]:
        if self._want is Want.RETURNING:
            self._next_want = ticket
            return []
        self._want, self._want_ticket = Want.ASKED, ticket
        return self._ask_for_item()

    def confirm(self, ticket: int) -> list[Command]:
        if self._want is not Want.LENT:
            return [Settle(ticket, Outcome.LOST, self.keeper)]
        self._want = Want.CONFIRMING
        return self._say(Kind.GOT, ticket)

    def took(self) -> None:
        self._want, self._item = Want.IDLE, None
        self._asked.pop(self._want_ticket, None)

    def stop_receiving(self) -> list[Command]:
        self._next_want = None
        match self._want:
            case Want.CONFIRMING:
                self._want = Want.RETURNING
            case Want.ASKED | Want.LENT:
                asked = self._asked[self._want_ticket]
                self.took()
                return [Tell(asked, Message(Kind.UNWANT, self._want_ticket))]
            case Want.OWNED:
                item = self._item
                self.took()
                return self._say(Kind.BACK, 0, item)
            case Want.IDLE | Want.RETURNING:
                pass
        return []

    def close(self, ticket: int) -> list[Command]:
        self._closes.add(ticket)
        return self._ask(Kind.CLOSE, ticket)

    def leave(self, here: PeerId) -> list[Command]:
        return self._say(Kind.LEFT, 0, (here, int(Leaving.DROPPED))) if self._is_counted else []

    def handle(self, sender: PeerId, message: Message) -> list[Command]:
        kind, ticket, body = message
        if kind is Kind.COUNTING:
            self._is_counted = True
            return self._follow(0, sender)
        if kind is Kind.MOVED:
            # The old keeper has taken none of the items that were offered there: they come before all later offers.
            moved = [offer for offer in self._offers if self._asked[offer] == sender != body]
            return [*self._follow(ticket, body), *(one for offer in moved for one in self._offer_again(offer))]
        if kind is Kind.ALONE:
            self.is_alone = True
            return self.say_whether_it_may_send()
        if kind is Kind.TAKEN:
            if ticket not in self._offers:
                return []
            del self._offers[ticket]
            del self._asked[ticket]
            return [Settle(ticket, Outcome.DONE)]
        if kind in _ENDINGS:
            return self._settle(ticket, _ENDINGS[kind], body)
        if ticket != self._want_ticket:
            return []
        if kind is Kind.ITEM and self._want is Want.ASKED:
            self._want, self._item = Want.LENT, body
            return [Settle(ticket, Outcome.DONE, body)]
        if kind is Kind.YOURS:
            return self._is_ours(ticket)
        return []

    def peer_lost(self, peer: PeerId) -> list[Command]:
        self.is_lost |= peer == self.keeper
        commands: list[Command] = []
        for ticket in [ticket for ticket, asked in self._asked.items() if asked == peer]:
            if self.is_lost or ticket in self._offers:
                # It may have taken the offered item, and handed it on.
                commands += self._settle(ticket, Outcome.LOST, peer)
            else:
                commands += self._ask_again(ticket)
        if self.is_lost and self._next_want is not None:
            commands += self._settle(self._next_want, Outcome.LOST, peer)
        return commands

    def _is_ours(self, ticket: int) -> list[Command]:
        if self._want is not Want.RETURNING:
            self._want = Want.OWNED
            del self._asked[ticket]
            return [Settle(ticket, Outcome.DONE)]
        item, again = self._item, self._next_want
        self._next_want = None
        self.took()
        # In this order, so that the next receive gets this item.
        return [*self._say(Kind.BACK, 0, item), *([] if again is None else self.receive(again))]

    def _follow(self, ticket: int, to: PeerId) -> list[Command]:
        """Repeat the receive or close with this ticket there, unless it was given up."""
        self.keeper, self.is_lost = to, self.is_lost and to == self.keeper
        commands = self._ask_again(ticket)
        if self._close_again and not self.is_lost:
            self._close_again = False
            commands += self._say(Kind.CLOSE, 0)
        return commands

    def _ask_again(self, ticket: int) -> list[Command]:
        if self._want is Want.ASKED and self._want_ticket == ticket:
            return self._ask_for_item()
        return self._ask(Kind.CLOSE, ticket) if ticket in self._closes else []

    def _offer_again(self, ticket: int) -> list[Command]:
        return self._ask(Kind.OFFER, ticket, self._offers[ticket])

    def _ask_for_item(self) -> list[Command]:
        self._said_may_send = self.may_send
        return self._ask(Kind.WANT, self._want_ticket, self.may_send)

    def _ask(self, kind: Kind, ticket: int, body: Any = None) -> list[Command]:
        if self.is_lost:
            return self._settle(ticket, Outcome.LOST, self.keeper)
        self._asked[ticket] = self.keeper
        return self._say(kind, ticket, body)

    def _settle(self, ticket: int, outcome: Outcome, body: Any) -> list[Command]:
        self._asked.pop(ticket, None)
        if ticket in self._closes:
            # A lost channel counts as closed, unless its queue turns up where it had moved to.
            self._closes.remove(ticket)
            self._close_again |= outcome is Outcome.LOST
            return [Settle(ticket, Outcome.DONE)]
        if ticket in self._offers:
            del self._offers[ticket]
        elif ticket == self._next_want:
            self._next_want = None
        elif ticket == self._want_ticket and self._want is not Want.IDLE:
            self.took()
        else:
            return []
        return [Settle(ticket, outcome, body)]

    def _say(self, kind: Kind, ticket: int, body: Any = None) -> list[Command]:
        return [Tell(self.keeper, Message(kind, ticket, body))]


class ChannelTable:
    """Leads messages to the keepers and ends of one process.

    Each method but `run` returns all resulting commands.
    """

    def __init__(self, here: PeerId) -> None:
        self.here = here
        self.keepers: dict[ChannelId, Keeper] = {}
        self.ends: dict[ChannelId, End] = {}

    def create(self, channel_id: ChannelId, capacity: int) -> None:
        self.keepers[channel_id] = Keeper(self.here, self.here, capacity)

    def run(self, channel_id: ChannelId, commands: list[Command]) -> list[Command]:
        """Returns the commands for others: outcomes, and messages to other processes."""
        left, others = deque(commands), list[Command]()
        while left:
            command = left.popleft()
            if isinstance(command, Tell) and command.to == self.here:
                left.extend(self.handle(channel_id, self.here, command.message))
            else:
                others.append(command)
        keeper = self.keepers.get(channel_id)
        if keeper is not None and keeper.is_over:
            del self.keepers[channel_id]
        return others

    def handle(self, channel_id: ChannelId, sender: PeerId, message: Message) -> list[Command]:
        if message.kind not in FOR_KEEPERS:
            end = self.ends.get(channel_id)
            if end is not None:
                return end.handle(sender, message)
            # A keeper that counts instead of the maker still has this process among the holders.
            left = Message(Kind.LEFT, 0, (self.here, int(Leaving.DROPPED)))
            return [Tell(sender, left)] if message.kind is Kind.COUNTING else []
        if message.kind is Kind.QUEUE:
            self.keepers[channel_id] = Keeper(self.here, channel_id[0], message.body.capacity)
        keeper = self.keepers.get(channel_id)
        if keeper is not None:
            return keeper.handle(sender, message)
        refused = refusal(message)
        return [] if refused is None else [Tell(sender, refused)]

    def peer_lost(self, channel_id: ChannelId, peer: PeerId, how: Leaving) -> list[Command]:
        keeper, end = self.keepers.get(channel_id), self.ends.get(channel_id)
        commands = [] if keeper is None else keeper.peer_lost(peer, how)
        return commands if end is None else [*commands, *end.peer_lost(peer)]

    def register(self, channel_id: ChannelId) -> list[Command]:
        end = self.ends.get(channel_id)
        return [] if end is None else [Tell(end.keeper, Message(Kind.HELD, 0, self.here))]

    def holder_came(self, channel_id: ChannelId, peer: PeerId) -> list[Command]:
        keeper = self.keepers.get(channel_id)
        return [] if keeper is None else keeper.holder_came(peer)

    def holder_left(self, channel_id: ChannelId, peer: PeerId, how: Leaving) -> list[Command]:
        keeper = self.keepers.get(channel_id)
        return [] if keeper is None else keeper.holder_left(peer, how)

    def drop(self, channel_id: ChannelId) -> list[Command]:
        keeper = self.keepers.pop(channel_id, None)
        return [] if keeper is None else keeper.drop()

    def leave(self, channel_id: ChannelId) -> list[Command]:
        end = self.ends.get(channel_id)
        if end is None or not end.is_idle:
            return []
        del self.ends[channel_id]
        return end.leave(self.here)
