"""Exceptions on the wire: they arrive as their own type, with the remote frames, or as text if that cannot be."""

from __future__ import annotations

import asyncio
import os
import re
from types import TracebackType
from typing import Any, Final

from aiodaft._protocol.codec import pack, unpack
from aiodaft._runtime.platform.error_log import text_of
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.pickling import TooLong
from aiodaft.exceptions import CallCancelled, DaftError, RemoteError, RestartLimitReached

# Where the runtime's own code is.
_RUNTIME: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep


_MAX_ENCODED: Final = 256 << 10


_MAX_TEXT: Final = 16 << 10


_MAX_MESSAGE: Final = 4 << 10


# What Python says of `await 1`.
_NOT_AWAITABLE: Final = re.compile(r"can't be (used in 'await' expression|awaited)")


_OWN_CALL: Final = (
    "a `def` method that is called on `self` gives its result, not a ref: do not await it; "
    "`aiodaft.local(self.method)(...)` tells type checkers so"
)


def encode_error(error: BaseException) -> bytes:
    """An exception as bytes; never raises, whatever the exception does when it is looked at."""
    type_name = f"{type(error).__module__}.{type(error).__qualname__}"
    # An exception may refuse to have its attributes set, as frozen dataclasses do.
    BaseException.with_traceback(error, _users_part(error.__traceback__))
    return pack([type_name, _message(error), text_of(error)[-_MAX_TEXT:], *_encode_object(error)])


def decode_error(data: bytes) -> BaseException:
    """The exception that `encode_error` encoded, or a RemoteError that tells of it."""
    type_name, message, text, payload, blob = unpack(data, _no_extensions)
    why = payload
    if isinstance(payload, bytes):
        try:
            return _decode_object(payload, blob)
        except Exception as problem:  # noqa: BLE001 - the class is not here, or refuses to be built: the text remains
            why = f"{type(problem).__name__}: {_message(problem)}"
    remote = RemoteError(f"{type_name}: {message}\n\n{text}")
    remote.type_name = type_name
    remote.traceback = text
    remote.add_note(f"it comes as text, because it cannot be rebuilt: {why}")
    return remote


def decode_failure(data: bytes, executed: bool | None) -> BaseException:
    """The exception that ended a call, or a step of a graph, which knows whether that ran."""
    error = decode_error(data)
    return error.with_executed(executed) if isinstance(error, DaftError) else error


def as_call_error(error: BaseException, where: str | None) -> Exception:
    """What a caller gets for what a method raised, with a note of where that was."""
    if isinstance(error, asyncio.CancelledError):
        cancelled = CallCancelled("the call was cancelled" if not str(error) else f"the call was cancelled: {error}")
        cancelled.__cause__ = error
        error = cancelled
    elif isinstance(error, StopIteration | StopAsyncIteration) or not isinstance(error, Exception):
        # Raised out of an await, these would end the caller's own generators, coroutines or loop.
        wrapped = RuntimeError(f"the method raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    assert isinstance(error, Exception)
    if where is not None:
        if isinstance(error, TypeError) and _NOT_AWAITABLE.search(str(error)):
            add_note(error, _OWN_CALL)
        add_note(error, where)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an exception, once; one that refuses goes without."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception:  # noqa: BLE001 - a user's exception may be frozen, or have notes of its own kind
        return


def copy_error(error: DaftError) -> DaftError:
    """A separate exception for another waiter."""
    copied = error.__reduce__()
    twin: DaftError = copied[0](*copied[1])
    twin.__cause__ = error.__cause__
    if hasattr(error, "__notes__"):
        twin.__notes__ = list(error.__notes__)
    return twin


def passed_on(error: BaseException, *, executed: bool | None) -> BaseException:
    """The error of one call as that of another, which ran or not: the first one goes on saying what is true of it."""
    if not isinstance(error, DaftError) or error.executed is executed:
        return error
    return copy_error(error).with_traceback(error.__traceback__).with_executed(executed)


def unsent(error: BaseException) -> BaseException:
    """The error of one more call that was not sent."""
    if not isinstance(error, DaftError) or isinstance(error, RestartLimitReached):
        # That an actor died too often is one error, however many wait for it.
        return error
    return copy_error(error).with_executed(False)


def take_frames(error: BaseException) -> list[tuple[BaseException, Any]]:
    """Take the tracebacks off an exception and its causes, because frames hold variables.

    Returns:
        What `give_frames` needs to give them tracebacks that show the same lines.
    """
    from tblib import Traceback  # noqa: PLC0415 - only errors need it

    taken: dict[int, tuple[BaseException, Any]] = {}
    found = [error]
    while found:
        one = found.pop()
        if id(one) in taken:
            continue
        taken[id(one)] = (one, one.__traceback__ and Traceback(one.__traceback__))
        # An exception may refuse to have its attributes set, as frozen dataclasses do.
        BaseException.with_traceback(one, None)
        attempts = one.attempts if isinstance(one, RestartLimitReached) else ()
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else attempts
        found += [other for other in (one.__cause__, one.__context__, *inner) if other is not None]
    return list(taken.values())


def give_frames(taken: list[tuple[BaseException, Any]]) -> None:
    """Undo `take_frames`: the new frames hold no variables."""
    for error, frames in taken:
        BaseException.with_traceback(error, frames and frames.as_traceback())


def _encode_object(error: BaseException) -> tuple[bytes | str, bytes | None]:
    """An exception as payload and blob; or why that cannot be, and None."""
    try:
        return _encode_whole(error)
    except Exception as problem:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        if not _is_too_large(problem):
            return _message(problem), None
    try:
        return _encode_whole(cut(error))
    except Exception as problem:  # noqa: BLE001 - the same
        return f"it is too large, and cannot be cut: {_message(problem)}", None


def _encode_whole(error: BaseException) -> tuple[bytes, bytes | None]:
    encoded = encode(error, names=Names("an exception"))
    if encoded.size > _MAX_ENCODED:
        raise TooLong
    blob = encoded.packed()
    # An exception that cannot be rebuilt here will not be rebuilt elsewhere either.
    _decode_object(encoded.payload, blob)
    return encoded.payload, blob


def _decode_object(payload: bytes, blob: Any) -> BaseException:
    error = decode(payload, [] if blob is None else [memoryview(bytearray(blob))])
    try:
        if not isinstance(error, BaseException):
            raise TypeError(f"it turns into a {type(error).__name__}")
        return error
    finally:
        # The frames that were rebuilt lead back to this one: it must not lead to them.
        del error


def _is_too_large(problem: BaseException | None) -> bool:
    """Whether an exception could not be encoded because it is large, or refers to others that refer to others..."""
    return problem is not None and (isinstance(problem, TooLong | RecursionError) or _is_too_large(problem.__cause__))


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Frames without those of the runtime, which led to the user's code; all of them if there are no others."""
    found: list[TracebackType] = []
    entry = frames
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_RUNTIME):
            found.append(entry)
        entry = entry.tb_next
    kept: TracebackType | None = None
    for entry in reversed(found):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or frames


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except Exception as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its text cannot be had: {type(problem).__name__}>"


def _no_extensions(code: int, content: bytes) -> Any:
    raise ValueError(f"unexpected extension {code} in an error")


# Bytes of one argument, attribute or note; and how many notes.
_MAX_PART: Final = 4 << 10


_MAX_NOTES: Final = 16


def cut(error: BaseException) -> BaseException:
    """A copy of an exception: long texts in it end early, a text stands for anything else that is large.

    What it was caused by is left out; a note says so.

    Raises:
        Exception: Its class cannot be made of that.
    """
    cls = type(error)
    args: tuple[Any, ...]
    if isinstance(error, BaseExceptionGroup):
        args = (_short(error.message), [cut(one) for one in error.exceptions])
    else:
        args = tuple(map(_short, error.args))
    twin = cls.__new__(cls, *args)
    twin.args = args
    notes = [_short(note) for note in getattr(error, "__notes__", ())][:_MAX_NOTES]
    twin.__dict__.update({name: _short(value) for name, value in error.__dict__.items() if name != "__notes__"})
    twin.__notes__ = [*notes, "cut, to travel: what is large in it, and what caused it, stayed where it was raised"]
    return twin.with_traceback(error.__traceback__)


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:_MAX_PART]
    if isinstance(value, str):
        rest = len(value) - _MAX_PART
        return value if rest <= 0 else f"{value[:_MAX_PART]}... and {rest} more"
    try:
        fits = encode(value, names=Names("a part")).size <= _MAX_PART
    except Exception:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        fits = False
    return value if fits else f"<{type(value).__qualname__}, too large to travel>"
