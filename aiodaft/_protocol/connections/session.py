"""One conversation between two processes: bytes in, messages out, and calls within a window. No I/O.

    submit ----> waiting ----> sent ----> answered (`settle`)
       |            |
       |            +--------> withdrawn
       +-> refused (Overloaded)

A call is sent when it has its message, the calls before it are sent, and the window has room: it limits the number of
unanswered calls and the bytes of their arguments. So the sender alone bounds the memory of the callee. All calls in the
window may wait for a call beyond it (such as one that opens a gate), so a window grows if no answer comes for some
time. A small call without order passes those that wait for their message or for room for their bytes: it may be the one
that looks after them. Other messages, such as runs of graphs, can line up behind the waiting calls (`line_up`).

The runtime's own calls (of agents, the node, supervisors, channels) are outside of the window, so that an overloaded
runtime can be inspected and stopped. They keep their order, and wait for earlier calls without a message: an actor that
is stopped gets all earlier calls.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from aiodaft._protocol.connections.codec import FrameDecoder, FrameEncoder
from aiodaft._protocol.connections.messages import (
    CALL,
    HELLO,
    INLINE_LIMIT,
    OLDEST_WIRE_VERSION,
    RING_OFFERED,
    RING_REFUSED,
    RING_USED,
    RING_WANTED,
    TELL,
    WIRE_VERSION,
    Message,
    check_all,
    hello,
    read_hello,
)
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft.exceptions import LocalProtocolError, Overloaded, RemoteProtocolError

# A class or function that a process cannot import is sent once over each connection, under a name, which later values
# have. The sender takes the name back when its class or function is gone.

T = TypeVar("T")


class Definitions(Generic[T]):
    def __init__(self) -> None:
        self._told: set[bytes] = set()
        # Is replaced, and never changed: a value that arrives keeps the definitions of that moment, until it is
        # decoded.
        self.heard: Mapping[bytes, T] = MappingProxyType({})
        # A name may be told again before it is known to be taken back.
        self._times: Counter[bytes] = Counter()

    def tell(self, name: bytes) -> bool:
        """Whether the other end has to be told the definition before a value that uses the name."""
        if name in self._told:
            return False
        self._told.add(name)
        return True

    def take_back(self, name: bytes) -> bool:
        if name not in self._told:
            return False
        self._told.remove(name)
        return True

    def hear(self, name: bytes, definition: T) -> None:
        self._times[name] += 1
        if name not in self.heard:
            self.heard = MappingProxyType({**self.heard, name: definition})

    def forget(self, name: bytes) -> None:
        self._times[name] -= 1
        if not self._times[name]:
            del self._times[name]
            self.heard = MappingProxyType({known: kept for known, kept in self.heard.items() if known != name})


CallT = TypeVar("CallT")

# The window: unanswered calls of one connection, and bytes of their arguments.
WINDOW: Final = 4096
WINDOW_BYTES: Final = 64 << 20
_PLAIN: Final = (CALL, TELL)
# Seconds without an answer after which the window grows.
STALL: Final = 1.0


class _Other:
    __slots__ = ()


@dataclass(slots=True)
class _MadeCall:
    message: Message | None
    # Earlier calls of users that have no message.
    behind: set[CallId | _Other]


class Session(Generic[CallT]):
    """The state of one conversation. It keeps a `CallT` with each call until the call is answered."""

    def __init__(self, local: PeerId, pid: int, *, remote: PeerId, max_pending: int, window: int = WINDOW) -> None:
        self.remote = remote
        self.remote_pid: int | None = None
        self.version = WIRE_VERSION
        self.calls: dict[CallId, CallT] = {}
        # Those of plain calls are packed, because bytes take less memory.
        self._waiting: OrderedDict[CallId | _Other, Message | bytes | None] = OrderedDict()
        self._others = 0
        self._own: set[CallId] = set()
        self._own_waiting: OrderedDict[CallId, _MadeCall] = OrderedDict()
        self._base_window = self._window = min(window, max_pending)
        # Without the runtime's own calls.
        self.answers = 0
        self._answers_before = 0
        self._max_pending = max_pending
        self._costs: dict[CallId, int] = {}
        self._bytes = 0
        self._window_bytes = WINDOW_BYTES
        self._decoder = FrameDecoder()
        self._encoder = FrameEncoder()
        self.send: Callable[[Message], None] = self._encoder.pack
        self.data_to_send = self._encoder.take
        # Frees the memory of the decoder. Calls stay.
        self.close = self._decoder.close
        self.packed = self._encoder.frames
        self.send(hello(local, pid))

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self._others

    @property
    def has_room(self) -> bool:
        return not self._waiting and len(self.calls) < self._window and self._bytes <= self._window_bytes

    @property
    def has_room_for_own(self) -> bool:
        return not self._own_waiting and None not in self._waiting.values()

    def is_waiting(self, call_id: CallId) -> bool:
        return call_id in self._waiting or call_id in self._own_waiting

    def unsent(self, call_id: CallId) -> Message | None:
        own = self._own_waiting.get(call_id)
        message = self._waiting.get(call_id) if own is None else own.message
        return None if isinstance(message, bytes) else message

    def under_way(self) -> Iterator[CallT]:
        return (call for call_id, call in self.calls.items() if not self.is_waiting(call_id))

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Return the messages that `data` completes, without HELLO.

        Raises:
            RemoteProtocolError: Do not use the session any more.
        """
        messages = self._decoder.feed(data)
        if self.remote_pid is None and messages:
            # HELLO first: later messages may be of a version that this process does not know.
            self._greet(*check_all(messages[:1]))
            del messages[0]
        return check_all(messages)

    def _greet(self, message: Message) -> None:
        if message[0] != HELLO:
            raise RemoteProtocolError(f"expected HELLO, got a message of kind {message[0]}")
        oldest, newest, remote, pid = read_hello(message)
        self.version = min(WIRE_VERSION, newest)
        if self.version < max(OLDEST_WIRE_VERSION, oldest):
            raise RemoteProtocolError(
                f"{remote} speaks wire versions {oldest} to {newest}, "
                f"this process {OLDEST_WIRE_VERSION} to {WIRE_VERSION}: install the same release of aiodaft for both"
            )
        if remote != self.remote:
            raise RemoteProtocolError(f"this connection leads to {remote}, not to {self.remote}")
        self.remote_pid = pid

    def submit(
        self,
        call_id: CallId,
        call: CallT,
        message: Message | None,
        cost: int = 0,
        admitted: bool = False,
        ordered: bool = True,
    ) -> bool:
        """Send a call, or let it wait; returns whether it was sent.

        Args:
            message: None until `provide`.
            admitted: The call was accepted before: do not refuse it.
            ordered: Whether it stays behind earlier ones.

        Raises:
            Overloaded: Too many calls have no answer yet.
        """
        if message is not None and (
            (not self._waiting and len(self.calls) < self._window and not self._bytes + cost > self._window_bytes)
            or (not ordered and self._passes(cost))
        ):
            self.calls[call_id] = call
            if cost:
                self._costs[call_id] = cost
                self._bytes += cost
            self.send(message)
            return True
        pending = len(self.calls) - len(self._own)
        if pending >= self._max_pending and not admitted:
            raise Overloaded(
                f"{pending} calls to {self.remote} have no answer yet, which is all that "
                f"Runtime(max_pending={self._max_pending}) allows; await some of them first"
            )
        self.calls[call_id] = call
        blocked = bool(self._waiting)
        self._waiting[call_id] = (
            message if message is None or message[0] not in _PLAIN else self._encoder.frame(message)
        )
        if cost:
            self._costs[call_id] = cost
        if not blocked:
            self._pump()
        return call_id not in self._waiting

    def _passes(self, cost: int) -> bool:
        """Whether a call without order passes the calls that wait."""
        unanswered = len(self.calls) - len(self._own)
        return cost <= INLINE_LIMIT and unanswered - self.waiting < self._window and unanswered < self._max_pending

    def submit_own(self, call_id: CallId, call: CallT, message: Message | None) -> None:
        self.calls[call_id] = call
        self._own.add(call_id)
        unprepared = {other for other, waiting in self._waiting.items() if waiting is None}
        self._own_waiting[call_id] = _MadeCall(message, unprepared)
        self._pump_own()

    def provide(self, call_id: CallId, message: Message, cost: int = 0) -> None:
        if call_id in self._own_waiting:
            self._own_waiting[call_id].message = message
        elif call_id in self._waiting:
            self._waiting[call_id] = message
            if cost:
                self._costs[call_id] = cost
            self._pump()
        else:
            raise LocalProtocolError(f"call {call_id} is not waiting for its message")
        self._pump_own(call_id)

    def line_up(self, message: Message) -> None:
        """Outside of the window, behind the waiting calls."""
        if not self._waiting:
            self.send(message)
            return
        self._others += 1
        self._waiting[_Other()] = message

    def withdraw(self, call_id: CallId) -> bool:
        if call_id in self._own_waiting:
            del self._own_waiting[call_id], self.calls[call_id]
            self._own.remove(call_id)
        elif call_id in self._waiting:
            del self._waiting[call_id], self.calls[call_id]
            self._costs.pop(call_id, None)
            self._pump()
        else:
            return False
        self._pump_own(call_id)
        return True

    def settle(self, call_id: CallId) -> CallT | None:
        if self._own and call_id in self._own:
            return self._settle_own(call_id)
        if self._waiting and call_id in self._waiting:
            return None
        call = self.calls.pop(call_id, None)
        if call is not None:
            self.answers += 1
            if call_id in self._costs:
                self._bytes -= self._costs.pop(call_id)
            if self._waiting:
                self._pump()
        return call

    def _settle_own(self, call_id: CallId) -> CallT | None:
        if call_id in self._own_waiting:
            return None
        self._own.remove(call_id)
        # It took no room of the window.
        return self.calls.pop(call_id)

    def look_for_stall(self) -> bool:
        """Enlarge the window if no call was answered since the last one of these calls. Returns whether calls still
        wait.
        """
        if self.answers == self._answers_before:
            self._window = min(2 * self._window, self._max_pending)
            self._window_bytes *= 2
            self._pump()
        else:
            self._window = self._base_window
            self._window_bytes = WINDOW_BYTES
        self._answers_before = self.answers
        return bool(self._waiting)

    def _pump_own(self, prepared: CallId | None = None) -> None:
        for own in self._own_waiting.values() if prepared is not None else ():
            own.behind.discard(prepared)
        while self._own_waiting:
            call_id, own = next(iter(self._own_waiting.items()))
            if own.message is None or own.behind:
                return
            del self._own_waiting[call_id]
            self.send(own.message)

    def _pump(self) -> None:
        while self._waiting:
            call_id, message = next(iter(self._waiting.items()))
            if message is None:
                return
            if isinstance(call_id, _Other):
                self._others -= 1
            else:
                cost = self._costs.get(call_id, 0)
                # A single call may exceed the byte window; otherwise it would wait forever.
                full = self._bytes and self._bytes + cost > self._window_bytes
                if full or len(self.calls) - len(self._own) - self.waiting >= self._window:
                    return
                self._bytes += cost
            del self._waiting[call_id]
            if isinstance(message, bytes):
                self.packed.append(message)
            else:
                self.send(message)


# Whether one process polls for messages or sleeps until it is woken.
# Polling finds an answer within microseconds; a wake-up takes tens of microseconds. Polling pays only while answers
# come soon on average, there is a second processor, and no actor's thread of this process runs, because polling takes
# the GIL.

# Seconds of polling after the last message, and the longest average gap between messages at which polling pays: the
# time of a step with a megabyte.
POLL: Final = 300e-6
# Seconds of polling before this process yields the processor between looks.
ALONE: Final = 10e-6
# If yielding takes more seconds than this, another process ran.
SWITCH: Final = 3e-6
# If it takes more than this, others use up their time slices: a wake-up would have come sooner.
SLICE: Final = 100e-6
# Longer gaps count as this many seconds.
_LONG: Final = 1e-3
_NEVER: Final = float("-inf")
_WEIGHT: Final = 1 / 8


class Idle(Enum):
    LOOK = "look again in the next turn of the loop"
    YIELD = "let other processes run before that"
    SLEEP = "wait until it is woken"


class Pace:
    """The times of one process's messages.

    Attributes:
        may_poll: There is a second processor.
        crowded: Another process wants the processor.
    """

    def __init__(self, *, may_poll: bool) -> None:
        self.may_poll = may_poll
        self.since = 0.0
        self.threads = 0
        self._gap = 0.0
        self.crowded = False

    def came(self, now: float) -> None:
        gap = now - self.since
        self.since = now
        self._gap += ((gap if gap < _LONG else _LONG) - self._gap) * _WEIGHT

    def idle(self, now: float) -> Idle:
        if not self.may_poll or self.threads or self._gap >= POLL or now - self.since >= POLL:
            return Idle.SLEEP
        return Idle.YIELD if self.crowded or now - self.since > ALONE else Idle.LOOK

    def yielded(self, seconds: float) -> None:
        """Another process that ran may be about to answer."""
        self.crowded = seconds > SWITCH
        if seconds > SLICE:
            # Sleep at the next look, and let it count as a long gap.
            self.since = _NEVER


class Way(Enum):
    SOCKET = "messages go over the socket"
    OFFERED = "this side has made rings, and the peer has not answered"
    WRITING = "this side writes to its ring; the peer still sends over the socket"
    RINGS = "both sides use their rings"


class Step(Enum):
    NOTHING = "nothing"
    ASK = "send RING_WANTED"
    OFFER = "make rings, and send RING_OFFERED"
    TAKE = "open the offered rings, send RING_USED, and write to them"
    USE = "send RING_USED, and write to the rings that were offered and read them"
    READ = "read the rings"
    DROP = "close the rings that were offered"


_WANT: Final = -1

_MAKER: Final = {
    (Way.SOCKET, _WANT): (Step.OFFER, Way.OFFERED),
    (Way.SOCKET, RING_WANTED): (Step.OFFER, Way.OFFERED),
    (Way.OFFERED, RING_WANTED): (Step.NOTHING, Way.OFFERED),
    (Way.RINGS, RING_WANTED): (Step.NOTHING, Way.RINGS),
    (Way.OFFERED, RING_USED): (Step.USE, Way.RINGS),
    (Way.OFFERED, RING_REFUSED): (Step.DROP, Way.SOCKET),
}

_TAKER: Final = {
    (Way.SOCKET, _WANT): (Step.ASK, Way.SOCKET),
    (Way.SOCKET, RING_OFFERED): (Step.TAKE, Way.WRITING),
    (Way.WRITING, RING_USED): (Step.READ, Way.RINGS),
}


class Upgrade:
    """The move of one connection from its socket to rings in shared memory. Only one side makes offers: none cross.

    process with the smaller id                 process with the larger id

                          <---  RING_WANTED                      only if this one wants rings
    makes rings           --->  RING_OFFERED + 3 descriptors     maps them
    reads, writes rings   <---  RING_USED + 1 descriptor         writes its ring from here on
                          --->  RING_USED + 1 descriptor         reads its ring from here on
    or drops them         <---  RING_REFUSED                     has no descriptors or memory
    """

    def __init__(self, *, makes: bool) -> None:
        self._table = _MAKER if makes else _TAKER
        self.way = Way.SOCKET

    def want(self) -> Step:
        """Nothing if the rings come already."""
        step, self.way = self._table.get((self.way, _WANT), (Step.NOTHING, self.way))
        return step

    def handle(self, stage: int) -> Step:
        found = self._table.get((self.way, stage))
        if found is None or stage == _WANT:
            raise RemoteProtocolError("an unexpected RING message came")
        step, self.way = found
        return step

    def failed(self) -> None:
        """The connection keeps its socket."""
        self.way = Way.SOCKET
