"""The causes of an exception: their chain, and a tree for people with the contents of each."""

from __future__ import annotations

from typing import Final

from aiodaft.html import Branch

__all__ = ["chain_of", "message_of", "tree_of"]

_MAX_CHAIN: Final = 16
_MAX_DEPTH: Final = 4
# Attributes that a tree has in another form.
_SHOWN_APART: Final = ("attempts", "traceback")


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    found = [error]
    while len(found) < _MAX_CHAIN:
        one = found[-1]
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is None or any(cause is known for known in found):
            break
        found.append(cause)
    return found


def message_of(error: BaseException, limit: int = 4 << 10) -> str:
    """The text of an exception, cut to a length."""
    try:
        return str(error)[:limit]
    except Exception as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its text cannot be had: {type(problem).__name__}>"


def tree_of(error: BaseException, depth: int = 0) -> list[Branch]:
    """The chain of an exception, the root cause first; each has its notes, its attributes and its inner exceptions."""
    return [Branch(_title(one), [*_details(one), *_inside(one, depth)]) for one in reversed(chain_of(error))]


def _title(error: BaseException) -> str:
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _details(error: BaseException) -> list[Branch]:
    known = [_shown(name, one) for name, one in vars(error).items() if name not in _SHOWN_APART and name[0] != "_"]
    notes = map(str, getattr(error, "__notes__", ()))
    return [Branch(text) for text in (*notes, *filter(None, known))]


def _shown(name: str, value: object) -> str:
    try:
        return f"{name}: {value}" if value else ""
    except Exception as problem:  # noqa: BLE001 - a user's __bool__ or __str__ may raise anything
        return f"{name}: <its text cannot be had: {type(problem).__name__}>"


def _inside(error: BaseException, depth: int) -> list[Branch]:
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else getattr(error, "attempts", ())
    # A user's exception may have something else by that name.
    found = [one for one in inside if isinstance(one, BaseException)] if isinstance(inside, tuple) else []
    return [branch for one in found if depth < _MAX_DEPTH for branch in tree_of(one, depth + 1)]
