"""Exceptions that are too large to travel as they are: their type, and what fits of the rest."""

from __future__ import annotations

from typing import Any, Final

from aiodaft._runtime.serialization.encoder import Names, encode

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
