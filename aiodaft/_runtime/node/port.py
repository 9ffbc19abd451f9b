"""The port of a node: connections of other machines come here, and go on to the processes that they are for."""

from __future__ import annotations

import socket

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.authentication import Authenticated
from aiodaft._runtime.connections.data_streams import FROM_AFAR
from aiodaft._runtime.connections.far import ANY_NODE, Answer, FarConnections
from aiodaft._runtime.node.workers import Launcher
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.tasks import logger


class NodePort:
    """Hands on the connections that its listener accepts."""

    def __init__(self, peer: Peer, far: FarConnections, launcher: Launcher) -> None:
        self._peer = peer
        self._far = far
        self._launcher = launcher

    def control_came(self, came: Authenticated) -> None:
        """A process of another machine has connected. Takes over the socket."""
        peer, remote, wanted, (sock, _, _, session) = self._peer, PeerId(came.sender), PeerId(came.to), came
        connections = peer.connections
        if wanted == ANY_NODE:
            # It closes the connection when it knows which node this is.
            self._far.refuse(sock, session, Answer.USED)
        elif wanted == peer.process.id:
            peer.process.create_task(self._far.accept(remote, sock, session), name=f"be connected to {remote}")
        elif wanted in self._launcher.workers:
            self._hand_on(sock, wanted, m.admit(remote, session.secret()))
        elif (known := connections.get(wanted)) is not None and known.far and known.lost is None:
            # A controller, which no connection can be handed to.
            peer.agent_of(wanted).connect.tell(remote)
            self._far.refuse(sock, session, Answer.LATER)
        else:
            self._far.refuse(sock, session, Answer.GONE)

    def data_came(self, came: Authenticated) -> None:
        """A transport of another machine has connected. Takes over the socket."""
        sender, wanted, connections = PeerId(came.sender), PeerId(came.to), self._peer.connections
        if wanted == self._peer.process.id:
            connections.stream_from_afar(sender, came.sock, came.session)
        elif wanted in self._launcher.workers:
            self._hand_on(came.sock, wanted, m.data(sender, FROM_AFAR, came.session.secret()))
        else:
            came.sock.close()

    def _hand_on(self, sock: socket.socket, wanted: PeerId, message: m.Message) -> None:
        try:
            with sock:
                self._peer.connections.to(wanted).send_fds(message, (sock.fileno(),))
        except OSError as error:
            # The other side tries again.
            logger.warning("a connection of another machine could not be handed to %s: %s", wanted, error)
