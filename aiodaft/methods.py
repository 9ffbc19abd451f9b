"""Remote methods: `@method`, the types of calls, and the specs of methods for caller and callee.

To type checkers a handle is an instance of the actor class, so they check calls with names and defaults. The type of a
remote method says that a call gives a `Ref`, and accepts refs in place of values.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from types import FunctionType, MethodDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from aiodaft._protocol.calls.mailbox import Rules, check_concurrency, check_max_queue
from aiodaft._protocol.calls.outgoing import check_retries
from aiodaft.reading import is_read_only
from aiodaft_transport import check_name

if TYPE_CHECKING:
    from aiodaft.ref import Ref, Stream

__all__ = [
    "ATTRIBUTE", "DefMethod", "Generated", "Method", "MethodSpec", "Options", "PlainMethods", "Sig", "StreamMethod",
    "StreamSig", "check_overrides", "is_private", "method", "passes_on", "signature_of", "specs_of",
]  # fmt: skip

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
S = TypeVar("S")

Generated: TypeAlias = AsyncIterator[R] | Iterator[R]

_SPECS: Final = "__aiodaft_specs__"
# The name of the method that reads an attribute of a hosted object; no attribute can have this name.
ATTRIBUTE: Final = "."

_PASSES_ON: Final = "__aiodaft_passes_on__"

_MOST_SHAPES: Final = 64
_SAYS_NOTHING: Final = ("_empty", "Any", "None")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `@method`.

    Attributes:
        rules: The order and concurrency of its calls.
        transport: Overrides the runtime's transport for its large results.
        retries: The number of times that a call is made again to a new incarnation.
    """

    rules: Rules
    transport: str | None = None
    retries: int = 0


class MethodSpec:
    """A remote method, for caller and callee."""

    __slots__ = (
        "_fitting", "_hidden", "_signature", "bound", "fn", "high", "is_stream", "label", "low", "name", "passes_on",
        "read_only", "retries", "rules", "transport",
    )  # fmt: skip

    def __init__(self, label: str, name: str, fn: Callable[..., Any], options: Options, *, hidden: int = 0) -> None:
        self.name = name
        self.fn = fn
        self.rules = options.rules
        self.transport = transport = options.transport
        self.retries = options.retries
        self.label = label
        # The number of leading arguments that are the runtime's own.
        self._hidden = hidden
        self.is_stream = _is_generator(fn)
        self.read_only = is_read_only(fn)
        self.passes_on: bool = getattr(fn, _PASSES_ON, False)
        # A method with a transport of its own: `check` examines every call, because the transport may not work here.
        fewest, most = _arity(fn) if transport is None else (1.0, 0.0)
        self.low, self.high = fewest, most
        self._signature: inspect.Signature | None = None
        # The class of this method of handles, once there is one.
        self.bound: type | None = None
        # Calls that fit the signature: the number of positional arguments, and the names of the others.
        self._fitting: set[tuple[object, ...]] = set()

    def argument(self, index: int) -> str:
        """The name of a positional argument in errors."""
        own = index - self._hidden
        return f"args[{own}]" if own >= 0 else "the class"

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError or Unreachable, at the caller's line, if the call must fail."""
        if not kwargs and self.low <= len(args) <= self.high:
            return
        shape = len(args), *kwargs
        if shape in self._fitting:
            return
        if self.transport is not None:
            check_name(self.transport)
        signature = self.signature
        if signature is None:
            # Unknown signature: the actor raises the TypeError.
            return
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.label}{signature}: {error}") from None
        if self.transport is None and len(self._fitting) < _MOST_SHAPES:
            self._fitting.add(shape)

    def named(self, label: str) -> MethodSpec:
        """The same method with another label, for a caller whose errors and stacks say more than its name."""
        spec = copy(self)
        spec.label, spec.bound = label, None
        return spec

    @property
    def signature(self) -> inspect.Signature | None:
        """The function's signature, including self; None if it has none."""
        if self._signature is None:
            self._signature = signature_of(self.fn)
        return self._signature

    @property
    def declared(self) -> str:
        """The type that the method declares for its result, as its author wrote it; empty if it declares none."""
        declared = inspect.Signature.empty if self.signature is None else self.signature.return_annotation
        text = declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))
        return "" if text in _SAYS_NOTHING else text


def passes_on(fn: F, /) -> F:
    """Declare that a method of the runtime returns its argument and does nothing else with it; below `@method`.

    Then a tensor that comes from another process is stored as it came, neither decoded nor encoded.
    """
    setattr(fn, _PASSES_ON, True)
    return fn


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function or class; None for builtins without a signature."""
    with suppress(TypeError, ValueError):
        return inspect.signature(fn)
    return None


def _arity(fn: Callable[..., Any]) -> tuple[float, float]:
    """Of a call that needs no further check, without self."""
    code = getattr(fn, "__code__", None)
    if (
        code is None
        or hasattr(fn, "__wrapped__")
        or code.co_kwonlyargcount > len(getattr(fn, "__kwdefaults__", None) or ())
    ):
        return 1, 0
    most = code.co_argcount - 1
    fewest = most - len(getattr(fn, "__defaults__", None) or ())
    return max(0, fewest), float("inf") if code.co_flags & inspect.CO_VARARGS else most


class Sig(Protocol[P, R_co]):
    """A method with these parameters and this result; group calls accept it."""

    def _typed(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class StreamSig(Protocol[P, R_co]):
    """A stream method with these parameters and items."""

    def _typed_stream(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _MethodBase:
    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self._options = options
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        self.__isabstractmethod__ = getattr(fn, "__isabstractmethod__", False)

    if not TYPE_CHECKING:
        # Hidden from type checkers: to them, calling the method of an instance gives a ref.

        def __get__(self, instance: Any, owner: type) -> Any:
            """The method itself for the class; a plain bound method for an instance."""
            return self if instance is None else self.__wrapped__.__get__(instance, owner)

        @property
        def __call__(self) -> Callable[..., Any]:
            """The function. Notebooks show its signature, too."""
            return self.__wrapped__

    def __repr__(self) -> str:
        return f"<remote method {self.__qualname__}>"


class Method(_MethodBase, Generic[P, R]):
    """A remote method with one result: calling it on a handle gives a `Ref` at once."""

    if TYPE_CHECKING:

        def _typed(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

        # The exact signature: names, defaults, keyword-only parameters, completion.
        @overload
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...
        # Refs among the first three positional arguments.
        @overload
        def __call__(self: Sig[Concatenate[A, Q], R], a: Ref[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, Q], R], a: A, b: Ref[B], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, Q], R], a: Ref[A], b: Ref[B], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, Q], R], a: A, b: B, c: Ref[C], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, Q], R], a: Ref[A], b: B, c: Ref[C], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, Q], R], a: A, b: Ref[B], c: Ref[C], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, Q], R], a: Ref[A], b: Ref[B], c: Ref[C], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        # A list of refs.
        @overload
        def __call__(
            self: Sig[Concatenate[list[A], Q], R], a: list[Ref[A]], /, *args: Q.args, **kwargs: Q.kwargs
        ) -> Ref[R]: ...
        # Refs among the first six. Their types are not checked: mypy cannot infer `A | Ref[A]`.
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, D, Q], R],
            a: A | Ref[Any],
            b: B | Ref[Any],
            c: C | Ref[Any],
            d: D | Ref[Any],
            /,
            *args: Q.args,
            **kwargs: Q.kwargs,
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, D, E, Q], R],
            a: A | Ref[Any],
            b: B | Ref[Any],
            c: C | Ref[Any],
            d: D | Ref[Any],
            e: E | Ref[Any],
            /,
            *args: Q.args,
            **kwargs: Q.kwargs,
        ) -> Ref[R]: ...
        @overload
        def __call__(
            self: Sig[Concatenate[A, B, C, D, E, F, Q], R],
            a: A | Ref[Any],
            b: B | Ref[Any],
            c: C | Ref[Any],
            d: D | Ref[Any],
            e: E | Ref[Any],
            f: F | Ref[Any],
            /,
            *args: Q.args,
            **kwargs: Q.kwargs,
        ) -> Ref[R]: ...
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]  # mypy takes Any for Method

        def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
            """Call without a reply; this process logs an error of the method."""


class DefMethod(Method[P, R]):
    """A remote `def` method: a call on `self` gives the result itself; see `aiodaft.typing.local`."""


class StreamMethod(_MethodBase, Generic[P, R]):
    """A remote generator, `async def` or `def`: calling it on a handle gives a `Stream` at once."""

    if TYPE_CHECKING:

        def _typed_stream(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...


class _Decorator(Protocol):
    """The type of `@method(...)` with options."""

    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> Method[P, R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], Generated[R]], /) -> StreamMethod[P, R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], R], /) -> DefMethod[P, R]: ...
    @overload
    def __call__(self, fn: Callable[..., Coroutine[Any, Any, R]], /) -> Method[..., R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def __call__(self, fn: Callable[..., Generated[R]], /) -> StreamMethod[..., R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def __call__(self, fn: Callable[..., R], /) -> DefMethod[..., R]: ...


@overload
def method(fn: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> Method[P, R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
@overload
def method(fn: Callable[Concatenate[S, P], Generated[R]], /) -> StreamMethod[P, R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
@overload
def method(fn: Callable[Concatenate[S, P], R], /) -> DefMethod[P, R]: ...
# To mypy, a method with `**options: int` fits none of these: `self` might be one of the options.
@overload
def method(fn: Callable[..., Coroutine[Any, Any, R]], /) -> Method[..., R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
@overload
def method(fn: Callable[..., Generated[R]], /) -> StreamMethod[..., R]: ...  # type: ignore[overload-overlap]  # the first that fits counts
@overload
def method(fn: Callable[..., R], /) -> DefMethod[..., R]: ...
@overload
def method(
    *,
    ordered: bool = True,
    concurrency: int | None = None,
    transport: str | None = None,
    idempotent: bool = False,
    retries: int | None = None,
    max_queue: int | None = None,
) -> _Decorator: ...
def method(
    fn: Any = None,
    /,
    *,
    ordered: bool = True,
    concurrency: int | None = None,
    transport: str | None = None,
    idempotent: bool = False,
    retries: int | None = None,
    max_queue: int | None = None,
) -> Any:
    """Make a method callable from other processes.

    `async def` methods run on the actor's loop, concurrently; `def` methods run on the actor's own thread, one at a
    time, so that the process stays responsive. A generator is a stream: an `async def` one runs on the loop, a `def`
    one on the thread, where other `def` methods may run between two items. Calls of one caller to one actor start in
    the order in which they were made. An `async def` method begins in the turn of the loop in which its call arrives,
    as an eager task does; until its first wait it shares its task with other such calls.

    Args:
        fn: The function, when used without options.
        ordered: False lets a call start before earlier calls of the same caller.
        concurrency: Calls of this method that may run at the same time in one actor; for `async def` and generators.
        transport: The transport of its large results, "shm", "ucx" or "tcp". Default: that of the runtime.
        idempotent: The method may run twice: if a call fails because its actor died, the runtime makes it again to the
            next incarnation, where `aiodaft.supervision.current_attempt()` gives the number of the attempt. A call that
            raises an error is not made again.
        retries: The most times that a call is made again. Default: 1.
        max_queue: Calls of this method that may wait at one actor; one more is refused at once with `Overloaded`
            (`.executed` is False). A call waits for the actor's thread (`def`), for a free place (`concurrency`), or
            for its arguments. `rt.on(max_queue=n)` limits the calls of all methods.

    Raises:
        TypeError: The function cannot be a remote method; the message says why.
        ValueError: `concurrency`, `retries` or `max_queue` is not a positive integer.
    """

    def decorate(function: Any) -> _MethodBase:
        on_thread = _check_function(function)
        name = function.__qualname__
        check_concurrency(concurrency, name, on_thread=on_thread)
        check_max_queue(max_queue, name)
        rules = Rules(
            function.__name__, on_thread=on_thread, ordered=ordered, concurrency=concurrency, max_queue=max_queue
        )
        is_stream = _is_generator(function)
        again = check_retries(retries, name, idempotent=idempotent, is_stream=is_stream)
        options = Options(rules, transport, again)
        if on_thread:
            return DefMethod(function, options)
        return (StreamMethod if is_stream else Method)(function, options)

    return decorate if fn is None else decorate(fn)


def _check_function(fn: Any) -> bool:
    if isinstance(fn, staticmethod | classmethod | property):
        raise TypeError(f"@method goes on a plain method, not on a {type(fn).__name__}")
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"@method goes on a function, not on {fn!r:.80}")
    if fn.__name__.startswith("__") and fn.__name__.endswith("__"):
        raise TypeError(
            f"{fn.__qualname__} cannot be a remote method: Python asks the handle itself for such names; take the "
            "decorator away, or call the method by another name"
        )
    on_thread, inner = _runs_on_thread(fn), inspect.unwrap(fn)
    if on_thread and (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
        raise TypeError(
            f"{fn.__qualname__} is `async def` under a decorator that makes a plain function of it, and so is over "
            "before its body runs: write the decorator's wrapper as `async def`, with `return await ...`"
        )
    return on_thread


def _is_generator(fn: Any) -> bool:
    return inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn)


def _runs_on_thread(fn: Any) -> bool:
    """Whether a call of a function, and not only the steps of its generator, runs on the actor's thread."""
    return not (_is_generator(fn) or inspect.iscoroutinefunction(fn))


def specs_of(cls: type) -> dict[str, MethodSpec]:
    """The remote methods of an actor class, by name."""
    specs: dict[str, MethodSpec] | None = cls.__dict__.get(_SPECS)
    if specs is None:
        specs = {}
        for name in dir(cls):
            found = inspect.getattr_static(cls, name)
            if isinstance(found, _MethodBase):
                specs[name] = MethodSpec(f"{cls.__name__}.{name}", name, found.__wrapped__, found._options)
        setattr(cls, _SPECS, specs)
    return specs


def check_overrides(cls: type) -> None:
    """Raise TypeError if a plain function of the class hides a remote method of a base."""
    for name, function in vars(cls).items():
        hidden = next((found for base in cls.__mro__[1:] if (found := vars(base).get(name)) is not None), None)
        if isinstance(function, FunctionType) and isinstance(hidden, _MethodBase):
            raise TypeError(
                f"{cls.__name__}.{name} overrides the remote method {hidden.__qualname__} and is none itself: "
                "decorate it with @aiodaft.method, too"
            )


class PlainMethods:
    """The methods of a plain class."""

    def __init__(self, cls: type) -> None:
        self._class = cls
        get = MethodSpec(f"{cls.__name__}.get", ATTRIBUTE, getattr, Options(Rules(ATTRIBUTE, on_thread=True)))
        self._by_name: dict[str, MethodSpec | None] = {ATTRIBUTE: get}
        self._by_function: dict[Any, MethodSpec] = {}

    def of(self, fn: Any) -> MethodSpec:
        """The spec of `Class.method`, of the class or one of its bases.

        Raises:
            TypeError: `fn` is not a method of the class.
            AttributeError: The method is private.
        """
        if not callable(fn):
            raise TypeError(_no_method(self._class, fn))
        if fn not in self._by_function:
            name = self._name_of(fn)
            spec = self.find(name)
            if spec is None:
                raise AttributeError(f"{self._class.__name__} has no public method {name!r}")
            self._by_function[fn] = spec
        return self._by_function[fn]

    def find(self, name: str) -> MethodSpec | None:
        """The spec of a public method, or of ATTRIBUTE; None if there is no such method."""
        if name not in self._by_name:
            self._by_name[name] = _plain_spec(self._class, name)
        return self._by_name[name]

    def _name_of(self, fn: Any) -> str:
        own = getattr(fn, "__name__", "")
        names = [own, *dir(self._class)] if not is_private(own) else [*dir(self._class), own]
        for name in names:
            if any(_is_same(getattr(base, name, None), fn) for base in self._class.__mro__):
                return name
        raise TypeError(_no_method(self._class, fn))


def _no_method(cls: type, fn: Any) -> str:
    return f"{fn!r:.80} is not a method of {cls.__name__}: name methods by the class, as {cls.__name__}.method"


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is no dunder name."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _is_same(found: Any, fn: Any) -> bool:
    # Each access to a class method makes a new object: compare by value.
    return found is fn or (isinstance(found, MethodType) and isinstance(fn, MethodType) and found == fn)


def _plain_spec(cls: type, name: str) -> MethodSpec | None:
    fn = None if is_private(name) else getattr(cls, name, None)
    if fn is None or not callable(fn):
        return None
    declared = inspect.getattr_static(cls, name)
    takes_instance = isinstance(declared, FunctionType | MethodDescriptorType)
    function = fn if takes_instance else _call_by_name(name, declared, fn)
    spec = MethodSpec(f"{cls.__name__}.{name}", name, function, Options(Rules(name, on_thread=_runs_on_thread(fn))))
    spec.is_stream = _is_generator(fn)
    return spec


def _call_by_name(name: str, declared: Any, fn: Any) -> Callable[..., Any]:
    """A function that calls an attribute that takes no instance, such as a static method."""

    def call(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(instance, name)(*args, **kwargs)

    if isinstance(declared, staticmethod | classmethod) and (signature := signature_of(fn)) is not None:
        instance = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        # Without its attributes: @read_only on a static method takes the first argument for the instance.
        update_wrapper(call, fn, updated=())
        vars(call)["__signature__"] = signature.replace(parameters=[instance, *signature.parameters.values()])
    return call
