"""Services: remote instances of plain classes, called by naming their methods."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from aiodaft._protocol.groups.roster import Roster
from aiodaft._runtime.serialization.containers import builder
from aiodaft.actor import target_of
from aiodaft.group import Group, Items, MemberChanges, Source
from aiodaft.methods import ATTRIBUTE, Generated, MethodSpec, PlainMethods, Sig, StreamSig, is_private
from aiodaft.ref import Ref, Refs, Stream

__all__ = ["Service", "ServiceGroup"]

P = ParamSpec("P")
P1 = ParamSpec("P1")
R = TypeVar("R")
A0 = TypeVar("A0")
T = TypeVar("T")

# Functions of a plain class: `async def`, and generators.
Async: TypeAlias = Callable[P, Coroutine[Any, Any, R]]
Generates: TypeAlias = Callable[P, Generated[R]]


@builder
class Service(Generic[T]):
    """Handle of an instance of any class that `rt.spawn` made: `await service.call(LLM.generate, prompts)`."""

    def __init__(self, handle: object, cls: type, methods: PlainMethods | None = None) -> None:
        self.handle = handle
        self._class = cls
        self._methods = methods or PlainMethods(cls)

    # An actor's method is not a method of a hosted class: None cannot be awaited.
    @overload
    def call(self, fn: Sig[..., Any] | StreamSig[..., Any], /, *args: Any, **kwargs: Any) -> None: ...
    @overload
    def call(self, fn: Async[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def call(  # type: ignore[overload-overlap]  # the first that fits counts
        self, fn: Generates[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    @overload
    def call(self, fn: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def call(
        self, fn: Async[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Ref[R]: ...
    @overload
    def call(  # type: ignore[overload-overlap]  # the first that fits counts
        self, fn: Callable[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
    ) -> Ref[R]: ...
    @overload
    def call(self, fn: Async[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    @overload
    def call(self, fn: Generates[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
    def call(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the instance: an instance, static, class or special method such as `Model.__call__`.

        Returns:
            A `Ref` of the result; for a generator a `Stream` of its items.

        Raises:
            TypeError: `fn` is not a method of the hosted class, or the arguments do not fit.
            AttributeError: `fn` is a private method.
        """
        spec, target = self._methods.of(fn), target_of(self.handle)
        return target.stream(spec, args, kwargs) if spec.is_stream else target.call(spec, args, kwargs)

    def get(self, name: str) -> Ref[Any]:
        """Read an attribute or a property of the instance, on the actor's thread.

        Raises:
            TypeError: The name is that of a method.
            AttributeError: The name is private; if there is no such attribute, awaiting the ref raises this.
        """
        if is_private(name):
            raise AttributeError(f"{self._class.__name__}.{name} is private")
        spec = self._methods.find(name)
        if spec is not None:
            raise TypeError(f"{spec.label} is a method: use `service.call({spec.label}, ...)`")
        return target_of(self.handle).call(cast("MethodSpec", self._methods.find(ATTRIBUTE)), (name,), {})

    def __repr__(self) -> str:
        return f"<Service of {self._class.__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Service, (self.handle, self._class)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                # Python asks for such names even before __init__ has run.
                raise AttributeError(f"a Service has no attribute {name!r}")
            cls = self._class
            if callable(getattr(cls, name, None)):
                what = f"use `service.call({cls.__name__}.{name}, ...)`"
            elif inspect.getattr_static(cls, name, None) is None:
                what = f"if it is an attribute of the instance, use `service.get({name!r})`"
            else:
                what = f"use `service.get({name!r})`"
            raise AttributeError(f"{self!r} has no attribute {name!r}: {what}")

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise TypeError(f"{self!r} is not callable: use `service.call({self._class.__name__}.__call__, ...)`")


@builder
class ServiceGroup(Group[Service[T]]):
    """Instances of any one class that `rt.group` made, with ranks: a `Group` of services.

    Methods are named by the class, `services.all(LLM.generate, prompts)`. An index gives a service, a slice gives a
    group of some of them, which does not own them.
    """

    def __init__(self, roster: Roster[Any], cls: type, owner: MemberChanges | None = None) -> None:
        super().__init__(roster, cls, owner)
        self._methods = PlainMethods(cls)

    def _member(self, handle: Any) -> Service[T]:
        return Service(handle, self._class, self._methods)

    def _find(self, m: Any) -> MethodSpec:
        return self._methods.of(m)

    def _has_method(self, name: str) -> bool:
        return self._methods.find(name) is not None

    if TYPE_CHECKING:
        # The same operations, for the functions of a plain class instead of an actor's methods.

        @overload  # type: ignore[override]  # see above
        def all(self, m: Async[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Refs[R]: ...
        @overload
        def all(self, m: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Refs[R]: ...
        @overload
        def all(
            self, m: Async[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        @overload
        def all(
            self, m: Callable[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        def all(self, m: Any, /, *args: Any, **kwargs: Any) -> Any: ...

        @overload  # type: ignore[override]  # see above
        def each(
            self, m: Async[Concatenate[T, A0, P1], R], a0: Items[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        @overload
        def each(
            self, m: Callable[Concatenate[T, A0, P1], R], a0: Items[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        def each(self, m: Any, a0: Any, /, *args: Any, **kwargs: Any) -> Any: ...

        @overload  # type: ignore[override]  # see above
        def split(
            self, m: Async[Concatenate[T, A0, P1], R], a0: A0, /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        @overload
        def split(
            self, m: Callable[Concatenate[T, A0, P1], R], a0: A0, /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Refs[R]: ...
        def split(self, m: Any, a0: Any, /, *args: Any, **kwargs: Any) -> Any: ...

        @overload  # type: ignore[override]  # see above
        def any(self, m: Async[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
        @overload
        def any(  # type: ignore[overload-overlap]  # the first that fits counts
            self, m: Generates[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
        ) -> Stream[R]: ...
        @overload
        def any(self, m: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
        @overload
        def any(
            self, m: Async[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Ref[R]: ...
        @overload
        def any(
            self, m: Callable[Concatenate[T, A0, P1], R], a0: Ref[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> Ref[R]: ...
        def any(self, m: Any, /, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        @overload  # type: ignore[override]  # see above
        def map(
            self, m: Async[Concatenate[T, A0, P1], R], items: Source[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> AsyncGenerator[R, None]: ...
        @overload
        def map(
            self, m: Callable[Concatenate[T, A0, P1], R], items: Source[A0], /, *args: P1.args, **kwargs: P1.kwargs
        ) -> AsyncGenerator[R, None]: ...
        @overload
        def map(
            self,
            m: Async[Concatenate[T, A0, ...], R],
            items: Source[A0],
            /,
            *args: Any,
            ordered: bool = True,
            return_exceptions: Literal[True],
            **kwargs: Any,
        ) -> AsyncGenerator[R | Exception, None]: ...
        @overload
        def map(
            self,
            m: Callable[Concatenate[T, A0, ...], R],
            items: Source[A0],
            /,
            *args: Any,
            ordered: bool = True,
            return_exceptions: Literal[True],
            **kwargs: Any,
        ) -> AsyncGenerator[R | Exception, None]: ...
        @overload
        def map(
            self, m: Async[Concatenate[T, A0, ...], R], items: Source[A0], /, *args: Any, ordered: bool, **kwargs: Any
        ) -> AsyncGenerator[R, None]: ...
        @overload
        def map(
            self,
            m: Callable[Concatenate[T, A0, ...], R],
            items: Source[A0],
            /,
            *args: Any,
            ordered: bool,
            **kwargs: Any,
        ) -> AsyncGenerator[R, None]: ...
        def map(self, m: Any, items: Any, /, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]
