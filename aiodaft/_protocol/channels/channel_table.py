"""The channels of one process: the queues that it keeps, and its ends. Pure: messages in, messages and outcomes out."""

from __future__ import annotations

from collections import deque

from aiodaft._protocol.channels.channel import (
    FOR_KEEPERS,
    ChannelId,
    Command,
    Keeper,
    Kind,
    Leaving,
    Message,
    Tell,
    refusal,
)
from aiodaft._protocol.channels.channel_end import End
from aiodaft._protocol.ids import PeerId


class ChannelTable:
    """Leads messages to the keepers and ends of one process.

    Each method but `run` returns all resulting commands; `run` carries out those for this process.
    """

    def __init__(self, here: PeerId) -> None:
        self.here = here
        self.keepers: dict[ChannelId, Keeper] = {}
        self.ends: dict[ChannelId, End] = {}

    def create(self, channel_id: ChannelId, capacity: int) -> None:
        self.keepers[channel_id] = Keeper(self.here, self.here, capacity)

    def run(self, channel_id: ChannelId, commands: list[Command]) -> list[Command]:
        """Carry out the commands for this process. Returns the others: outcomes, and messages to other processes."""
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
        """Handle a message about a channel that this process may not know any more."""
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

    # Holders, which the maker counts.

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
        """A channel that was made here has no holder left."""
        keeper = self.keepers.pop(channel_id, None)
        return [] if keeper is None else keeper.drop()

    def leave(self, channel_id: ChannelId) -> list[Command]:
        """This process no longer holds a channel: forget its end, unless something is under way there."""
        end = self.ends.get(channel_id)
        if end is None or not end.is_idle:
            return []
        del self.ends[channel_id]
        return end.leave(self.here)
