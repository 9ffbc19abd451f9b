"""What goes over a control link: positional arrays whose first item says what they are.

The hot messages (CALL, REPLY) are plain tuples built where they are sent; this table is their documentation and
their check. A *value* on the wire is three fields: `payload` (encoded skeleton), `blobs` (None, the buffers
themselves, or grants of a transport) and `refs` (descriptors of refs that travel inside).

A *descriptor* is (owner, number, producer, label): whose ref it is, its number there, which process makes the value
and by which method; or (payload, blobs, refs): the value itself, when it is small and known.

An *input* or *result* in RUN, FLOW and REPORT begins with the number of the value in its graph: (index, plain value),
(index, encoded exception, whether the step ran), (index, payload, blobs, refs, descriptors of awaited refs), or
(index,) alone: the sender keeps it for the graph's owner, or there is none and the step is over.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final, TypeAlias

from aiodaft.exceptions import RemoteProtocolError

Message: TypeAlias = tuple[Any, ...]

WIRE_VERSION: Final = 1
OLDEST_WIRE_VERSION: Final = 1

# Results and arguments up to this many bytes travel in the message itself.
INLINE_LIMIT: Final = 64 << 10
# Arguments that need no encoding beyond the frame's own; longer text and bytes are encoded, and so accounted for.
PLAIN_TEXT_LIMIT: Final = 1 << 10

HELLO: Final = 0
CALL: Final = 1
SEND: Final = 2
REPLY: Final = 3
RESULT: Final = 4
STORED: Final = 5
ERROR: Final = 6
CANCEL: Final = 7
ITEM: Final = 8
CREDIT: Final = 9
PULL: Final = 10
VALUE: Final = 11
MOVED: Final = 12
BROKEN: Final = 13
RELEASE: Final = 14
ADOPTED: Final = 15
NOTE: Final = 16
INTRODUCE: Final = 17
BYE: Final = 18
BORROW: Final = 19
JOIN: Final = 20
LEAVE: Final = 21
RING: Final = 22
RUN: Final = 23
FLOW: Final = 24
REPORT: Final = 25
SKIP: Final = 26

KINDS: Final = 27

# Stages of RING: rings are asked for; here they are; they are used from here on, which both sides say; they cannot be.
RING_WANTED: Final = 0
RING_OFFERED: Final = 1
RING_USED: Final = 2
RING_REFUSED: Final = 3

# How the callee treats a SEND.
WANT_REPLY: Final = 0
WANT_STREAM: Final = 1
WANT_NOTHING: Final = 2

_None: Final = type(None)
_Types: TypeAlias = tuple[type, ...]

_INT: Final = (int,)
_STR: Final = (str,)
_BYTES: Final = (bytes,)
_TUPLE: Final = (tuple,)
_PLAIN: Final = (_None, bool, int, float, str, bytes)
_BLOBS: Final = (_None, bytes, tuple)

_LAYOUT: Final[dict[int, tuple[_Types, ...]]] = {
    # oldest version spoken, newest version spoken, sender's id, sender's pid
    HELLO: (_INT, _INT, _STR, _INT),
    # call id, actor, method, plain positional arguments
    CALL: (_INT, _INT, _STR, _TUPLE),
    # call id, actor, method, what is wanted, microseconds left, payload, blobs, refs, descriptors of awaited refs, how
    # often it was sent before
    SEND: (_INT, _INT, _STR, _INT, (_None, int), _BYTES, _BLOBS, _TUPLE, _TUPLE, _INT),
    # call id, plain value
    REPLY: (_INT, _PLAIN),
    # call id, payload, blobs, refs
    RESULT: (_INT, _BYTES, _BLOBS, _TUPLE),
    # call id, bytes kept at the sender
    STORED: (_INT, _INT),
    # call id, encoded exception, whether the call ran
    ERROR: (_INT, _BYTES, (_None, bool)),
    # call id
    CANCEL: (_INT,),
    # call id, payload, blobs, refs
    ITEM: (_INT, _BYTES, _BLOBS, _TUPLE),
    # call id, how many more items are welcome
    CREDIT: (_INT, _INT),
    # owner, number
    PULL: (_STR, _INT),
    # owner, number, payload, blobs, refs
    VALUE: (_STR, _INT, _BYTES, _BLOBS, _TUPLE),
    # owner, number, whom to ask
    MOVED: (_STR, _INT, _STR),
    # owner, number, encoded exception
    BROKEN: (_STR, _INT, _BYTES),
    # numbers of the sender's own refs whose values nobody needs any more
    RELEASE: (_TUPLE,),
    # call id: the refs inside its result are registered
    ADOPTED: (_INT,),
    # transport, its note, how many descriptors come along
    NOTE: (_STR, _BYTES, _INT),
    # peer at the other end of the socket that comes along
    INTRODUCE: (_STR,),
    # reason
    BYE: (_STR,),
    # number of a ref of the receiver that the sender holds from now on
    BORROW: (_INT,),
    # owner, number, whether to keep a copy: the value, on its way to the receiver, may be asked for there by others
    JOIN: (_STR, _INT, (bool,)),
    # owner, number, process that has, or needs, no copy of the value for others
    LEAVE: (_STR, _INT, _STR),
    # stage: an offer comes with three descriptors, and is, as its acceptance, the last that comes over the socket
    RING: (_INT,),
    # graph of the sender, run, its oldest run that is not over, microseconds left, numbers of the results, inputs
    RUN: (_INT, _INT, _INT, (_None, int), _TUPLE, _TUPLE),
    # whose graph, graph, run, results that steps of the receiver need
    FLOW: (_STR, _INT, _INT, _TUPLE),
    # graph of the receiver, run, results that it wants, or has to know are over
    REPORT: (_INT, _INT, _TUPLE),
    # graph of the sender, run: nobody wants its results any more
    SKIP: (_INT, _INT),
}

_SHAPES: Final = {kind: frozenset((int, *types) for types in product(*fields)) for kind, fields in _LAYOUT.items()}


def check_all(messages: list[Any]) -> list[Message]:
    """Return the messages if each is of a known kind and its fields have the right types.

    Raises:
        RemoteProtocolError: One of them is not one of our messages.
    """
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
    # Types only: the repr of what a stranger sends may take any time, memory and depth of the stack.
    if message.__class__ is not tuple:
        return str(message.__class__.__name__)
    return f"({', '.join(type(field).__name__ for field in message[:10])})"
