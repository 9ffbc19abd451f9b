"""Encodes exceptions with their type and frames, or as text if they cannot be pickled."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.diagnostics.failures import raised_by
from aiodaft._runtime.platform.tasks import text_of
from aiodaft._runtime.process import refuses_pickle
from aiodaft._runtime.serialization.containers import Parts, bare_error, fill_error, parts_of_error
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.pickling import FrameData, TooLong, frames_of, traceback_of
from aiodaft.causes import message_of
from aiodaft.exceptions import CallCancelled, DaftError, RemoteError, RestartLimitReached

ErrorT = TypeVar("ErrorT", bound=BaseException)

_RUNTIME: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGE: Final = os.path.dirname(os.path.dirname(_RUNTIME)) + os.sep
_MAX_ENCODED: Final = 256 << 10
_MAX_TEXT: Final = 16 << 10
_MAX_BESIDE: Final = 500
# The message of the TypeError that `await 1` raises.
_NOT_AWAITABLE: Final = re.compile(r"can't be (used in 'await' expression|awaited)")
# Those of `asyncio.get_running_loop()` and `asyncio.get_event_loop()`.
_NO_LOOP: Final = re.compile(r"no (running|current) event loop")
_ON_THREAD: Final = "a `def` method runs on the actor's thread, without an event loop: make it `async def`"
_OWN_CALL: Final = (
    "a `def` method that is called on `self` gives its result, not a ref: do not await it; "
    "`aiodaft.typing.local(self.method)(...)` tells type checkers so"
)


def encode_error(error: BaseException) -> bytes:
    type_name = f"{type(error).__module__}.{type(error).__qualname__}"
    # An exception may refuse to have its attributes set, as frozen dataclasses do.
    BaseException.with_traceback(error, _users_part(error.__traceback__))
    return pack([type_name, message_of(error), text_of(error)[-_MAX_TEXT:], *_encode_object(error)])


def encoded_text(data: bytes) -> str:
    return str(unpack(data)[2])


def decode_error(data: bytes) -> BaseException:
    type_name, message, text, payload, blob = unpack(data)
    why = payload
    if isinstance(payload, bytes):
        try:
            error = _decode_object(payload, blob)
            if refuses_pickle():
                # Without pickle, its frames come as text.
                add_note(error, f"the remote traceback:\n{text}")
            return error
        except Exception as problem:  # noqa: BLE001 - the class is not here, or refuses to be built: the text remains
            why = f"{type(problem).__name__}: {message_of(problem)}"
    remote = RemoteError(f"{type_name}: {message}\n\n{text}")
    remote.type_name = type_name
    remote.traceback = text
    remote.add_note(f"it comes as text, because it cannot be rebuilt: {why}")
    return remote


def decode_failure(data: bytes, executed: bool | None) -> BaseException:
    """The exception that ended a call or a step of a graph, with whether it ran."""
    error = decode_error(data)
    return error.with_executed(executed) if isinstance(error, DaftError) else error


def as_call_error(error: BaseException, where: str | None, why_cancelled: str = "") -> Exception:
    if isinstance(error, asyncio.CancelledError):
        cancelled = CallCancelled(
            ": ".join(filter(None, [f"{where or 'the call'} was cancelled", why_cancelled, str(error)]))
        )
        cancelled.__cause__ = error.with_traceback(_users_part(error.__traceback__))
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
        elif needs_loop(error):
            add_note(error, _ON_THREAD)
        add_note(error, raised_by(where))
    return error


def needs_loop(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _NO_LOOP.search(str(error)) is not None


def add_note(error: BaseException, note: str) -> None:
    """An exception that refuses notes stays without."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception:  # noqa: BLE001 - a user's exception may be frozen, or have notes of its own kind
        return


def copy_error(error: ErrorT) -> ErrorT:
    copied: Any = error.__reduce__()
    twin: ErrorT = copied[0](*copied[1])
    twin.__cause__ = error.__cause__
    if hasattr(error, "__notes__"):
        twin.__notes__ = list(error.__notes__)
    return twin


def passed_on(error: BaseException, *, executed: bool | None) -> BaseException:
    if not isinstance(error, DaftError) or error.executed is executed:
        return error
    return copy_error(error).with_traceback(error.__traceback__).with_executed(executed)


def unsent(error: BaseException) -> BaseException:
    if not isinstance(error, DaftError) or isinstance(error, RestartLimitReached):
        # One error for all calls that wait for an actor that died too often.
        return error
    return copy_error(error).with_executed(False)


def failed_beside(what: str, error: BaseException) -> CallCancelled:
    return CallCancelled(f"{what} failed: {type(error).__name__}: {message_of(error)}"[:_MAX_BESIDE])


def needed_by(error: BaseException, consumer: str, source: str = "") -> BaseException:
    """The error of a call that does not run, because its argument, the result of `source`, has failed.

    An exception of its own: the error may be that of other calls, too.
    """
    own = decode_error(encode_error(error))
    frames = error.__traceback__
    if frames is not None and frames.tb_frame.f_code.co_filename.startswith(_RUNTIME):
        # No frame is the user's; these lead to the other arguments, which a circle would keep.
        BaseException.with_traceback(error, None)
    which = f": its argument is the result of {source}" if source else ""
    add_note(own, f"needed by {consumer}, which did not run{which}")
    return own


def take_frames(error: BaseException) -> list[tuple[BaseException, list[FrameData]]]:
    """Take the tracebacks off an exception and its causes, because frames hold variables; for `give_frames`."""
    taken: dict[int, tuple[BaseException, list[FrameData]]] = {}
    found = [error]
    while found:
        one = found.pop()
        if id(one) in taken:
            continue
        taken[id(one)] = (one, frames_of(one.__traceback__))
        BaseException.with_traceback(one, None)
        attempts = one.attempts if isinstance(one, RestartLimitReached) else ()
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else attempts
        found += [other for other in (one.__cause__, one.__context__, *inner) if other is not None]
    return list(taken.values())


def give_frames(taken: list[tuple[BaseException, list[FrameData]]]) -> None:
    for error, frames in taken:
        BaseException.with_traceback(error, traceback_of(frames))


def _encode_object(error: BaseException) -> tuple[bytes | str, bytes | None]:
    try:
        return _encode_whole(error)
    except Exception as problem:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        if not _is_too_large(problem):
            return message_of(problem), None
    try:
        return _encode_whole(truncated(error))
    except Exception as problem:  # noqa: BLE001 - the same
        return f"it is too large, and cannot be truncated: {message_of(problem)}", None


def _encode_whole(error: BaseException) -> tuple[bytes, bytes | None]:
    encoded = encode(error, names=Names("an exception"), limit=_MAX_ENCODED)
    if encoded.size > _MAX_ENCODED:
        raise TooLong
    blob = encoded.packed()
    # An exception that cannot be rebuilt here cannot be rebuilt in the other process.
    _decode_object(encoded.payload, blob)
    return encoded.payload, blob


def _decode_object(payload: bytes, blob: Any) -> BaseException:
    error = decode(payload, [] if blob is None else [memoryview(bytearray(blob))])
    try:
        if not isinstance(error, BaseException):
            raise TypeError(f"it turns into a {type(error).__name__}")
        return error
    finally:
        # Break the circle: the rebuilt frames refer to this one.
        del error


def _is_too_large(problem: BaseException | None) -> bool:
    return problem is not None and (isinstance(problem, TooLong | RecursionError) or _is_too_large(problem.__cause__))


def frames_of_program(error: BaseException) -> TracebackType | None:
    """The frames of an error without those of aiodaft; an error that is none of aiodaft's has at least these."""
    kept = _without(error.__traceback__, _PACKAGE)
    return kept if kept is not None or isinstance(error, DaftError) else error.__traceback__


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    return _without(frames, _RUNTIME) or frames


def _without(frames: TracebackType | None, folder: str) -> TracebackType | None:
    found: list[TracebackType] = []
    entry = frames
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(folder):
            found.append(entry)
        entry = entry.tb_next
    kept: TracebackType | None = None
    for entry in reversed(found):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


_MAX_PART: Final = 4 << 10
_MAX_NOTES: Final = 16


def truncated(error: BaseException) -> BaseException:
    """A truncated copy of an exception: long texts end early, other large objects become texts, causes are left out.

    Raises:
        Exception: The C code of its class refuses the arguments.
    """
    args, state, fields = parts_of_error(error)
    cut = [_short(arg) for arg in args]
    if isinstance(error, BaseExceptionGroup):
        cut[:2] = [_short(error.message), [truncated(one) for one in error.exceptions]]
    twin = bare_error(type(error), cut)
    notes = [_short(note) for note in getattr(error, "__notes__", ())][:_MAX_NOTES]
    fill_error(twin, Parts(cut, _short_values(state), _short_values(fields)))
    if isinstance(error, UnicodeError):
        # Its text is made of parts that have been cut.
        notes.append(_short(f"its text was: {message_of(error)}"))
    notes.append("truncated to travel: its large parts and its causes stayed in the process that raised it")
    twin.__dict__["__notes__"] = notes
    return BaseException.with_traceback(twin, error.__traceback__)


def _short_values(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(value) for name, value in parts.items() if name != "__notes__"}


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:_MAX_PART]
    if isinstance(value, str):
        rest = len(value) - _MAX_PART
        return value if rest <= 0 else f"{value[:_MAX_PART]}... and {rest} more"
    try:
        fits = encode(value, names=Names("a part"), limit=_MAX_PART).size <= _MAX_PART
    except Exception:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        fits = False
    return value if fits else f"<{type(value).__qualname__}, too large to travel>"
