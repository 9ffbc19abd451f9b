"""What handles each kind of message; and the messages that belong to no part of a process in particular."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft.exceptions import PeerLost, RemoteProtocolError
from aiodaft_transport import TransportError

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Link
    from aiodaft._runtime.peer import Peer


class Dispatch:
    """The messages that come to one process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handlers(self) -> list[Callable[[Link, m.Message], object]]:
        """What handles each kind, by its number."""
        peer = self._peer
        table: dict[int, Callable[[Link, m.Message], object]] = {
            m.CALL: peer.hosted.call_came,
            m.SEND: peer.hosted.send_came,
            m.CANCEL: peer.hosted.cancel_came,
            m.CREDIT: peer.hosted.credit_came,
            m.ADOPTED: peer.hosted.adopted_came,
            m.REPLY: peer.replies.replied,
            m.RESULT: peer.replies.answered,
            m.STORED: peer.replies.answered,
            m.ERROR: peer.replies.answered,
            m.ITEM: peer.replies.item_came,
            m.PULL: peer.transfer.asked,
            m.VALUE: peer.transfer.answered,
            m.MOVED: peer.transfer.answered,
            m.BROKEN: peer.transfer.answered,
            m.JOIN: peer.transfer.relays.join_came,
            m.LEAVE: peer.transfer.relays.leave_came,
            m.BORROW: peer.refs.borrow_came,
            m.RELEASE: self._release_came,
            m.NOTE: self._note_came,
            m.INTRODUCE: self._introduction_came,
            m.BYE: self._bye_came,
            m.RING: peer.upgrades.came,
            **peer.graphs.handlers,
        }
        return [table.get(kind, self._unexpected) for kind in range(m.KINDS)]

    def _introduction_came(self, link: Link, message: m.Message) -> None:
        remote = PeerId(message[1])
        try:
            (fd,) = link.take_fds(1)
        except OSError as error:
            # Only what is sent to that process fails.
            (self._peer.links.get(remote) or self._peer.new_link(remote)).close(
                exhausted(error, f"there is no connection to {remote}")
            )
            return
        connection = socket.socket(fileno=fd)
        if link.remote != self._peer.options.home:
            connection.close()
            raise RemoteProtocolError(f"{link.remote} introduces peers, which only the node may")
        self._peer.attach(remote, connection)

    def _note_came(self, link: Link, message: m.Message) -> None:
        _, name, note, count = message
        fds: list[int] = []
        if count:
            # What is missing costs what the note is about, which the transport says.
            with suppress(OSError):
                fds = link.take_fds(count)
        try:
            self._peer.store.transport_named(name).note_received(link, note, fds)
        except TransportError as error:
            raise RemoteProtocolError(f"{link.remote} sent a wrong note: {error}") from error

    def _release_came(self, link: Link, message: m.Message) -> None:
        for number in message[1]:
            self._peer.store.drop((link.remote, number))

    def _bye_came(self, link: Link, message: m.Message) -> None:
        link.dismissed = True
        link.close(PeerLost(message[1]))

    def _unexpected(self, link: Link, message: m.Message) -> None:
        raise RemoteProtocolError(f"{link.remote} sent an unexpected message of kind {message[0]}")
