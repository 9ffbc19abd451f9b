"""Services: instances of classes that know nothing of aiodaft, called by naming their methods."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from aiodaft.actor import target_of
from aiodaft.methods import plain_spec
from aiodaft.ref import Ref

__all__ = ["Service"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")
T = TypeVar("T")


class Service(Generic[T]):
    """Handle of an instance that `rt.host` made: `await service.call(LLM.generate, prompts)`."""

    def __init__(self, handle: object, cls: type) -> None:
        self.handle = handle
        self._class = cls

    @overload
    def call(
        self, fn: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Ref[R]: ...
    @overload
    def call(self, fn: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def call(
        self,
        fn: Callable[Concatenate[T, A0, P1], Coroutine[Any, Any, R]],
        a0: Ref[A0],
        /,
        *args: P1.args,
        **kwargs: P1.kwargs,
    ) -> Ref[R]: ...
    @overload
    def call(
        self, fn: Callable[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Ref[R]: ...
    def call(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the instance.

        Raises:
            TypeError: `fn` is not a method of the hosted class, or the arguments do not fit.
        """
        name = getattr(fn, "__name__", "")
        if getattr(self._class, name, None) is not fn:
            raise TypeError(f"{fn!r:.80} is not a method of {self._class.__name__}")
        return target_of(self.handle).call(plain_spec(self._class, name), args, kwargs)

    def __repr__(self) -> str:
        return f"<Service of {self._class.__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Service, (self.handle, self._class)
