"""The messages that go over a connection: tuples with the kind as the first item.

========== ===================== ================================================================================
Kind       From -> to            Fields
========== ===================== ================================================================================
HELLO      each side, once       oldest and newest wire version that it speaks, its id, its pid
CALL       caller -> callee      call id, actor, method, plain positional arguments, or the payload of small arguments
TELL       caller -> callee      as CALL, but nothing is to be returned: OVER is the answer
APPLY      caller -> callee      call id, actor, method, plain positional arguments, *awaited refs* among them
SEND       caller -> callee      call id, actor, method, mode (WANT_*), *terms*, *value* (the arguments), descriptors of
                                 awaited refs, number of earlier attempts
REPLY      callee -> caller      call id, plain value
OVER       callee -> caller      call ids: these have ended, and the caller does not want their results
RESULT     callee -> caller      call id, *value*
STORED     callee -> caller      call id, size of the value, which stays at the callee, and its description, for people
ERROR      callee -> caller      call id, encoded exception, whether the call ran; without exception: the caller has
                                 cancelled it (None), or the actor moves to another process, or has moved, and did not
                                 accept it (False)
CANCEL     caller -> callee      call id
ITEM       callee -> caller      call id of a stream, *value*
CREDIT     caller -> callee      call id of a stream, number of further items that the callee may send
ADOPTED    caller -> callee      call id: the refs inside its result or item are registered
FORWARD    owner -> producer     call id, consumer: it is to be answered as if it had sent PULL
ASK        owner -> consumer     number of a ref: a FORWARD may be lost, so ask for the value
PULL       consumer -> producer  owner, number
GIVEN      producer -> consumer  owner, number, plain value
VALUE      producer -> consumer  owner, number, *value*
MOVED      producer -> consumer  owner, number, process that has the value
BROKEN     producer -> consumer  owner, number, encoded exception
JOIN       producer -> consumer  owner, number, whether to keep a copy: other consumers of the value may ask this one
LEAVE      consumer -> producer  owner, number, process that has, or needs, no copy of the value for others
RELEASE    owner -> producer     numbers of the owner's refs; their values are not needed any more
BORROW     borrower -> owner     number of a ref that the sender holds from now on
NOTE       transport -> same     name of the transport, its note, number of descriptors that come along
INTRODUCE  node -> any process   process at the other end of the socket that comes along
BYE        any -> any            reason why the sender ends the connection
RING       any -> any            stage (RING_*)
RUN        owner -> participant  graph of the sender, run, its oldest run that is not over, *terms*, numbers of the
                                 wanted results, *inputs*
FLOW       any -> participant    owner of the graph, graph, run, *inputs*: results that the receiver's steps need
REPORT     participant -> owner  graph of the receiver, run, *inputs*: results that it wants, or that are over
SKIP       owner -> participant  graph of the sender, run: its results are not wanted any more
DEFINE     any -> any            name of a class or function, and its definition, pickled by value
FORGET     any -> any            name that no later value has
ADMIT      node -> any process   process of another machine, and the key of the connection that it has made, the socket
                                 of which comes along
DATA       node -> any process   process at the other end of the stream for payload that comes along, the number under
                                 which the receiver asked for it: 0 if the other process did, -1 if the stream itself
                                 says it; then the key of that connection
REACH      any -> any            names of the transports, beside "tcp", that lead to the sender from other machines
RENEWED    any -> any            why the sender lost the connection before this one, of which the receiver may not know
========== ===================== ================================================================================

A *value* is three fields: `payload` (the encoded skeleton), `blobs` (None, the buffers themselves, or grants of a
transport) and `refs` (descriptors of the refs that travel inside it).

A *descriptor* is (owner, number, producer, label): the owner of the ref, its number there, the process that makes the
value and the method that does; or (payload, blobs, refs): the value itself, when it is small and known.

*Terms* are None; or the microseconds left; or a tuple of these, or None, and the traceparent, tracestate and baggage of
the trace that the call is part of.

An *awaited ref* of APPLY is an index of the positional arguments, which has None there, and a descriptor.

An *input* is a tuple that begins with the index of a value in its graph; its length says what follows (PLAIN_VALUE and
the constants beside it).

For each kind, a function of its name builds the message, and `read_<kind>` returns its fields. No other module knows
the position of a field. Some kinds are built as tuples where they are sent, and unpacked where they are handled: CALL,
TELL and REPLY, because each function counts there, those of a pull (PULL to BROKEN), and RUN, FLOW and REPORT. Use:

    from aiodaft._protocol.connections import messages as m

    connection.send(m.credit(number, 16))
    number, count = m.read_credit(message)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, Final, TypeAlias

from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft.exceptions import RemoteProtocolError

Message: TypeAlias = tuple[Any, ...]
Descriptors: TypeAlias = tuple[Any, ...]
Value: TypeAlias = tuple[bytes, Any, Descriptors]
Awaited: TypeAlias = tuple[int, PeerId, CallId, PeerId, str]
SentTerms: TypeAlias = int | tuple[Any, ...] | None
Arguments: TypeAlias = tuple[bytes, Any, Descriptors, Descriptors]

# Frames, and HELLO, are the same in every version: so each side can read the other's versions, and answer.
WIRE_VERSION: Final = 1
OLDEST_WIRE_VERSION: Final = 1

# Results and arguments up to this many bytes travel in the message itself.
INLINE_LIMIT: Final = 64 << 10
# Arguments that need no encoding beyond the frame's own; longer text and bytes are encoded, and so accounted for.
PLAIN_TEXT_LIMIT: Final = 1 << 10
PLAIN_ARGS_LIMIT: Final = 1 << 11
# So many text arguments need not be accounted for: the calls of a full window have no more bytes than it may have.
FEW_ARGS: Final = 1 << 4

KINDS: Final = 39
# The place of a kind is its number on the wire: a new one comes last.
(
    HELLO, CALL, SEND, REPLY, RESULT, STORED, ERROR, CANCEL, ITEM, CREDIT, PULL, VALUE, MOVED, BROKEN, RELEASE, ADOPTED,
    NOTE, INTRODUCE, BYE, BORROW, JOIN, LEAVE, RING, RUN, FLOW, REPORT, SKIP, APPLY, FORWARD, ASK, GIVEN,
    DEFINE, FORGET, ADMIT, DATA, REACH, TELL, OVER, RENEWED,
) = range(KINDS)  # fmt: skip

# Stages of RING. USED, sent by both sides, is the last message of its direction that goes over the socket.
RING_WANTED: Final = 0
RING_OFFERED: Final = 1  # three descriptors come along
RING_USED: Final = 2  # one descriptor comes along
RING_REFUSED: Final = 3

WANT_REPLY: Final = 0
WANT_STREAM: Final = 1
WANT_NOTHING: Final = 2

# Lengths of inputs. (index,): the sender keeps the value for the owner of the graph, or the step is over and the owner
# needs no value.
STORED_VALUE: Final = 1
# (index, value): the value travels in the frame as it is.
PLAIN_VALUE: Final = 2
# (index, encoded exception, whether the step ran)
FAILED_VALUE: Final = 3
# (index, payload, blobs, refs, descriptors of awaited refs)
ENCODED_VALUE: Final = 5
GraphItem: TypeAlias = tuple[Any, ...]

_None: Final = type(None)
_Types: TypeAlias = tuple[type, ...]

_INT: Final = (int,)
_STR: Final = (str,)
_BYTES: Final = (bytes,)
_TUPLE: Final = (tuple,)
_PLAIN: Final = (_None, bool, int, float, str, bytes)
_TERMS: Final = (_None, int, tuple)
_BLOBS: Final = (_None, bytes, tuple)

_LAYOUT: Final[dict[int, tuple[_Types, ...]]] = {
    HELLO: (_INT, _INT, _STR, _INT),
    CALL: (_INT, _INT, _STR, (tuple, bytes)),
    SEND: (_INT, _INT, _STR, _INT, _TERMS, _BYTES, _BLOBS, _TUPLE, _TUPLE, _INT),
    REPLY: (_INT, _PLAIN),
    RESULT: (_INT, _BYTES, _BLOBS, _TUPLE),
    STORED: (_INT, _INT, _STR),
    ERROR: (_INT, _BYTES, (_None, bool)),
    CANCEL: (_INT,),
    ITEM: (_INT, _BYTES, _BLOBS, _TUPLE),
    CREDIT: (_INT, _INT),
    PULL: (_STR, _INT),
    VALUE: (_STR, _INT, _BYTES, _BLOBS, _TUPLE),
    MOVED: (_STR, _INT, _STR),
    BROKEN: (_STR, _INT, _BYTES),
    RELEASE: (_TUPLE,),
    ADOPTED: (_INT,),
    NOTE: (_STR, _BYTES, _INT),
    INTRODUCE: (_STR,),
    BYE: (_STR,),
    BORROW: (_INT,),
    JOIN: (_STR, _INT, (bool,)),
    LEAVE: (_STR, _INT, _STR),
    RING: (_INT,),
    RUN: (_INT, _INT, _INT, _TERMS, _TUPLE, _TUPLE),
    FLOW: (_STR, _INT, _INT, _TUPLE),
    REPORT: (_INT, _INT, _TUPLE),
    SKIP: (_INT, _INT),
    APPLY: (_INT, _INT, _STR, _TUPLE, _TUPLE),
    FORWARD: (_INT, _STR),
    ASK: (_INT,),
    GIVEN: (_STR, _INT, _PLAIN),
    DEFINE: (_BYTES, _BYTES),
    FORGET: (_BYTES,),
    ADMIT: (_STR, _BYTES),
    DATA: (_STR, _INT, _BYTES),
    REACH: (_TUPLE,),
    TELL: (_INT, _INT, _STR, (tuple, bytes)),
    OVER: (_TUPLE,),
    RENEWED: (_STR,),
}

_SHAPES: Final = {kind: frozenset((int, *types) for types in product(*fields)) for kind, fields in _LAYOUT.items()}


def check_all(messages: list[Any]) -> list[Message]:
    """Raises RemoteProtocolError: a kind or the type of a field is not ours."""
    message: Any = None
    try:
        for message in messages:
            # One lookup for the kind, the number of fields and all their types: this is on the path of every call.
            if message.__class__ is not tuple or tuple(map(type, message)) not in _SHAPES[message[0]]:
                raise RemoteProtocolError(f"a message of kind {message[0]} has the wrong fields: {_outline(message)}")
    except (TypeError, IndexError, KeyError) as error:
        raise RemoteProtocolError(f"not a message of this protocol: {_outline(message)}") from error
    return messages


def _outline(message: Any) -> str:
    # Types only: the repr of a stranger's object may take any time, memory and depth of the stack.
    if message.__class__ is not tuple:
        return str(message.__class__.__name__)
    return f"({', '.join(type(field).__name__ for field in message[:10])})"


def hello(local: PeerId, pid: int) -> Message:
    return HELLO, OLDEST_WIRE_VERSION, WIRE_VERSION, local, pid


def send(
    number: CallId, actor: ActorId, name: str, mode: int, terms: SentTerms, args: Arguments, tries: int
) -> Message:
    return SEND, number, actor, name, mode, terms, *args, tries


def over(numbers: Iterable[CallId]) -> Message:
    return OVER, (*numbers,)


def result(number: CallId, value: Value) -> Message:
    return RESULT, number, *value


def stored(number: CallId, size: int, kind: str) -> Message:
    return STORED, number, size, kind


def error(number: CallId, encoded: bytes, executed: bool | None) -> Message:
    return ERROR, number, encoded, executed


def away(number: CallId) -> Message:
    return ERROR, number, b"", False


def cancelled(number: CallId) -> Message:
    return ERROR, number, b"", None


def item(number: CallId, value: Value) -> Message:
    return ITEM, number, *value


def cancel(number: CallId) -> Message:
    return CANCEL, number


def credit(number: CallId, count: int) -> Message:
    return CREDIT, number, count


def release(number: CallId) -> Message:
    return RELEASE, (number,)


def adopted(number: CallId) -> Message:
    return ADOPTED, number


def note(transport: str, content: bytes, count: int) -> Message:
    return NOTE, transport, content, count


def introduce(remote: PeerId) -> Message:
    return INTRODUCE, remote


def admit(remote: PeerId, session: bytes) -> Message:
    return ADMIT, remote, session


def data(remote: PeerId, number: int, session: bytes = b"") -> Message:
    return DATA, remote, number, session


def reach(names: tuple[str, ...]) -> Message:
    return REACH, names


def renewed(reason: str) -> Message:
    return RENEWED, reason


def bye(reason: str) -> Message:
    return BYE, reason


def borrow(number: CallId) -> Message:
    return BORROW, number


def join(owner: PeerId, number: CallId, keep: bool) -> Message:
    return JOIN, owner, number, keep


def leave(owner: PeerId, number: CallId, member: PeerId) -> Message:
    return LEAVE, owner, number, member


def ring(stage: int) -> Message:
    return RING, stage


def skip(graph: int, number: int) -> Message:
    return SKIP, graph, number


def apply(number: CallId, actor: ActorId, name: str, args: tuple[Any, ...], awaited: tuple[Awaited, ...]) -> Message:
    return APPLY, number, actor, name, args, awaited


def forward(number: CallId, consumer: PeerId) -> Message:
    return FORWARD, number, consumer


def ask(number: CallId) -> Message:
    return ASK, number


def given(owner: PeerId, number: CallId, value: Any) -> Message:
    return GIVEN, owner, number, value


def define(name: bytes, source: bytes) -> Message:
    return DEFINE, name, source


def forget(name: bytes) -> Message:
    return FORGET, name


def _number(message: Message) -> CallId:
    return message[1]


def _number_and_value(message: Message) -> tuple[CallId, Value]:
    return message[1], message[2:]


def _number_and_count(message: Message) -> tuple[CallId, int]:
    return message[1:]


read_cancel = read_adopted = read_borrow = read_ask = _number
read_result = read_item = _number_and_value
read_credit = _number_and_count


def read_stored(message: Message) -> tuple[CallId, int, str]:
    return message[1:]


def read_hello(message: Message) -> tuple[int, int, PeerId, int]:
    return message[1:]


def read_send(message: Message) -> tuple[CallId, ActorId, str, int, SentTerms, Arguments, int]:
    _, number, actor, name, mode, terms, payload, blobs, refs, slots, tries = message
    return number, actor, name, mode, terms, (payload, blobs, refs, slots), tries


def read_apply(message: Message) -> tuple[CallId, ActorId, str, tuple[Any, ...], tuple[Awaited, ...]]:
    return message[1:]


def read_forward(message: Message) -> tuple[CallId, PeerId]:
    return message[1:]


def read_given(message: Message) -> tuple[PeerId, CallId, Any]:
    return message[1:]


def read_error(message: Message) -> tuple[CallId, bytes, bool | None]:
    return message[1:]


def read_over(message: Message) -> tuple[CallId, ...]:
    return message[1]


def read_release(message: Message) -> tuple[CallId, ...]:
    return message[1]


def read_note(message: Message) -> tuple[str, bytes, int]:
    return message[1:]


def read_introduce(message: Message) -> PeerId:
    return message[1]


def read_admit(message: Message) -> tuple[PeerId, bytes]:
    _, remote, session = message
    return remote, session


def read_data(message: Message) -> tuple[PeerId, int, bytes]:
    _, remote, number, session = message
    return remote, number, session


def read_reach(message: Message) -> tuple[str, ...]:
    return message[1]


def read_renewed(message: Message) -> str:
    return message[1]


def read_bye(message: Message) -> str:
    return message[1]


def read_join(message: Message) -> tuple[PeerId, CallId, bool]:
    return message[1:]


def read_leave(message: Message) -> tuple[PeerId, CallId, PeerId]:
    return message[1:]


def read_ring(message: Message) -> int:
    return message[1]


def read_skip(message: Message) -> tuple[int, int]:
    return message[1:]


def read_define(message: Message) -> tuple[bytes, bytes]:
    return message[1:]


def read_forget(message: Message) -> bytes:
    return message[1]
