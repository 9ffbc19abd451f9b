"""Finds the part of a value that cannot travel, and the path to it: `args[0].cfg.fn`."""

from __future__ import annotations

import copyreg
import dataclasses
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import FunctionType
from typing import Any, Final

from aiodaft._runtime.serialization.code import globals_used

# The code of pickle and of the runtime.
_INSIDE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep, pickle.__file__, copyreg.__file__
_MAX_DEPTH: Final = 20
_MAX_CHILDREN: Final = 1000


def find_path(names: Iterable[tuple[str, Any]], attempt: Callable[[Any], object]) -> tuple[str, str]:
    """The deepest part of some values that cannot be encoded.

    Returns:
        The path to the part, and why it cannot be encoded.
    """
    path, reason = "the value", ""
    parts: Iterable[tuple[str, Any]] = names
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        failing = next(
            ((name, value, why) for name, value in islice(parts, _MAX_CHILDREN) if (why := _why(value, attempt))), None
        )
        # An object that refers to itself has no deepest part.
        if failing is None or id(failing[1]) in seen:
            break
        path, value, reason = failing
        seen.add(id(value))
        parts = _children(value, path)
    return path, reason


def advice_on(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "; it is nested too deeply: make it flatter, or make it in the actor"
    if not _refuses(error):
        return ""
    if str(error).endswith(" 'generator' object"):
        return "; to give its values one by one, `yield` them in the method itself, which is a stream then"
    if str(error).endswith(" 'coroutine' object"):
        return "; `await` it, and pass what it gives"
    return "; make it in the actor, or leave it out of its object's state (`__getstate__`)"


def cause_of(error: BaseException) -> BaseException | None:
    """The error, with frames of the user's code alone, if that raised it or the value is nested too deeply."""
    if isinstance(error, RecursionError):
        return error.with_traceback(None)
    frames = None if _refuses(error) else error.__traceback__
    while frames is not None and _is_inside(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return None if frames is None else error.with_traceback(frames)


def _refuses(error: BaseException) -> bool:
    """Whether the message is the one of pickle for objects that cannot be pickled."""
    return str(error).startswith(("cannot pickle", "Can't pickle", "no default __reduce__"))


def _is_inside(filename: str) -> bool:
    return filename.startswith(_INSIDE) or f"{os.sep}cloudpickle{os.sep}" in filename


def _why(value: Any, attempt: Callable[[Any], object]) -> str:
    try:
        attempt(value)
    except Exception as error:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        return f"{str(error) or type(error).__name__} ({type(value).__module__}.{type(value).__qualname__})"
    return ""


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}[{key!r:.40}]", item
            yield f"{path}[key {key!r:.40}]", key
    elif isinstance(value, list | tuple | set | frozenset):
        fields = getattr(value, "_fields", None)
        yield from (((f"{path}.{fields[i]}" if fields else f"{path}[{i}]"), item) for i, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{path}.{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, type):
        own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
        yield from ((f"{path}.{name}", getattr(item, "__wrapped__", item)) for name, item in own.items())
    elif isinstance(value, FunctionType):
        there, name = value.__globals__, value.__qualname__
        used = [each for each in globals_used(value.__code__) if each in there]
        yield from ((f"the global {each} that {name} uses, in {path}", there[each]) for each in used)
        variables = inspect.getclosurevars(value).nonlocals
        yield from ((f"the variable {each} of {name}, in {path}", item) for each, item in variables.items())
    elif not _has_own_reduce(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", item) for name, item in attributes.items())


def _has_own_reduce(value: Any) -> bool:
    # Such an object is not pickled by its attributes.
    return isinstance(type(value).__reduce__, FunctionType)
