"""Values that are not copied: results that actors lend, and arguments that methods only read."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeAlias, TypeVar, cast

from aiodaft.exceptions import BorrowError

if TYPE_CHECKING:
    import torch

__all__ = ["Borrowed", "borrow", "is_read_only", "read_only", "unwrap"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Names of arguments, their tensors, and the versions of these.
_Versions: TypeAlias = "list[tuple[str, torch.Tensor, int]]"

_MARK: Final = "__aiodaft_read_only__"


def read_only(fn: F, /) -> F:
    """Declare that a method does not write to its arguments; it goes below `@aiodaft.method`.

    Then tensors on a GPU that the method's process has, too, are not copied for it: it gets tensors that lie in the
    memory of the value itself, made by any process, and any number of such methods share it. The memory is
    kept for as long as the method, or its actor, keeps such a tensor or a view of it.

    A write to a tensor among the arguments, or directly inside a list, tuple or dict of them, is detected when the
    method returns: its call raises BorrowError. By then others may have read the written values. Writes that torch does
    not count, such as those of a kernel of your own, are not detected.

    Raises:
        TypeError: It is not a function.
        BorrowError: From the call: the method wrote to an argument.
    """
    if not inspect.isfunction(fn):
        raise TypeError(f"@read_only goes on a function, below @method, not on {fn!r:.80}")
    checked = _checked(fn, fn.__qualname__)
    setattr(checked, _MARK, True)
    return cast(F, checked)


def is_read_only(fn: object) -> bool:
    """Whether a function is declared to write to none of its arguments."""
    return getattr(fn, _MARK, False)


def _checked(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(fn)
    async def checked_stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        before, items = _versions(args, kwargs), fn(*args, **kwargs)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()
        _check(name, before)

    @wraps(fn)
    async def checked_async(*args: Any, **kwargs: Any) -> Any:
        before = _versions(args, kwargs)
        result = await fn(*args, **kwargs)
        _check(name, before)
        return result

    @wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        before = _versions(args, kwargs)
        result = fn(*args, **kwargs)
        _check(name, before)
        return result

    @wraps(fn)
    def checked_steps(*args: Any, **kwargs: Any) -> Generator[Any]:
        before = _versions(args, kwargs)
        yield from fn(*args, **kwargs)
        _check(name, before)

    if inspect.isasyncgenfunction(fn):
        return checked_stream
    if inspect.isgeneratorfunction(fn):
        return checked_steps
    return checked_async if inspect.iscoroutinefunction(fn) else checked


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Versions:
    named = [*((f"args[{index}]", value) for index, value in enumerate(args[1:])), *kwargs.items()]
    return [(which, tensor, tensor._version) for which, value in named for tensor in _tensors(value)]


def _check(name: str, before: _Versions) -> None:
    for which, tensor, version in before:
        if tensor._version != version:
            raise BorrowError(
                f"{name} is declared @read_only, but wrote to a tensor of {which}, which others may read: "
                "let it write to x.clone(), or remove @read_only"
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that count their versions: a value itself, or those directly in it."""
    # A thread may be about to import torch.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None:
        return
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    for one in inside:
        if isinstance(one, kind) and not one.is_inference():
            yield one


class Borrowed(Generic[T]):
    """A result that is not copied; see `borrow`."""

    __slots__ = ("_released", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self._released = asyncio.Event()

    async def released(self) -> None:
        """Wait until the caller has dropped its ref and no process reads the value.

        Cancellation: only this wait ends.
        """
        await self._released.wait()

    def mark_released(self) -> None:
        """Wake `released`; called by the runtime when no process reads the value."""
        self._released.set()

    def __reduce__(self) -> NoReturn:
        raise TypeError("borrow() is for the whole result of a method: pass the value itself, it travels as it is now")


def borrow(value: T, /) -> T:
    """Return a result from a method without a copy: `return aiodaft.borrow(self.weights)`.

    Do not write to the value until `await ref.released()` (at the caller) or `await lent.released()` (in the actor, on
    the object that `borrow` returned) has returned. An earlier write by torch is detected: the reader gets BorrowError,
    never a mixture (docs/promises.md: which writes are not). To type checkers the result has the type of the value.
    """
    return cast(T, Borrowed(value))


def unwrap(result: Any) -> tuple[Any, Borrowed[Any] | None]:
    """The value of a method's result or item, and its lender, if it is lent."""
    return (result.value, result) if isinstance(result, Borrowed) else (result, None)
