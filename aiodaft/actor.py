"""Actors, and the handles through which they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, cast

from aiodaft._protocol.calls.mailbox import check_max_queue
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.node.worker import Health, Patience
from aiodaft._protocol.supervision import Restart, check_alone
from aiodaft.html import facts, page, table
from aiodaft.methods import DefMethod, MethodSpec, check_overrides, signature_of, specs_of

if TYPE_CHECKING:
    from aiodaft.ref import Ref, Stream

__all__ = ["Actor", "ActorFacts", "BoundMethod", "CallTarget", "Handle", "class_of", "handle_of", "local", "target_of"]

P = ParamSpec("P")
R = TypeVar("R")

_OPTIONS: Final = "cpus, gpus, resources, patience, restart and max_queue"


class Actor:
    """Base class of actors: their instances live in other processes. Adds no public names.

    The class line says what an instance needs, `class Model(Actor, gpus=1)`; `rt.on(gpus=...)` overrides it. If the
    class is a context manager, the runtime enters the instance before its first call and leaves it when the actor is
    stopped: on the actor's loop if it is an async one, else on the actor's thread.

    With a restart policy, `class Model(Actor, restart=Restart(...))`, the class may have a method
    `on_restart(self, epoch: int)`, `def` or `async def`: it runs in each new incarnation, after the constructor and
    before any call, for instance to load a checkpoint. `epoch` counts the attempts to restart the actor; a failure of
    the method counts as one more death.
    """

    __aiodaft_demand__: ClassVar[Demand] = Demand()
    __aiodaft_patience__: ClassVar[Patience | None] = None
    __aiodaft_max_queue__: ClassVar[int | None] = None
    __aiodaft_restart__: ClassVar[Restart | None] = None

    def __init_subclass__(
        cls,
        *,
        cpus: float | None = None,
        gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        patience: Patience | None = None,
        restart: Restart | None = None,
        max_queue: int | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            super().__init_subclass__(**kwargs)
        except TypeError as error:
            if not kwargs:
                raise
            raise TypeError(
                f"class {cls.__name__}({', '.join(kwargs)}): {error}; an Actor has the options {_OPTIONS}"
            ) from error
        check_overrides(cls)
        if inspect.iscoroutinefunction(vars(cls).get("__init__")):
            raise TypeError(
                f"{cls.__name__}.__init__ cannot be `async def`: await in `async def __aenter__(self)`, which runs "
                "before the first call, and clean up in `async def __aexit__(self, *error)`"
            )
        if restart is not None:
            cls.__aiodaft_restart__ = check_alone(restart)
        _check_hook(cls)
        base = cls.__aiodaft_demand__
        cls.__aiodaft_demand__ = Demand(
            cpus=base.cpus if cpus is None else cpus,
            gpus=base.gpus if gpus is None else gpus,
            custom=base.custom if resources is None else dict(resources),
        )
        cls.__aiodaft_patience__ = patience or cls.__aiodaft_patience__
        cls.__aiodaft_max_queue__ = check_max_queue(max_queue, cls.__name__) or cls.__aiodaft_max_queue__


def _check_hook(cls: type) -> None:
    hook = cls.__dict__.get("on_restart")
    if hook is None:
        return
    try:
        inspect.signature(hook).bind(None, 1)
    except TypeError:
        raise TypeError(f"{cls.__name__}.on_restart takes the epoch of the new incarnation, and nothing else") from None


class ActorFacts(NamedTuple):
    """The facts about an actor that this process knows, without asking another one.

    Attributes:
        name: Its name in errors.
        state: "alive", "draining", "silent", "restarting" or "dead".
        process: The id of its process; empty while it is down.
    """

    name: str
    state: str
    process: PeerId


class CallTarget(Protocol):
    """The actor that a handle calls."""

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]: ...
    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]: ...
    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def reduce(self, cls: type) -> tuple[Any, ...]: ...
    def health(self) -> Health: ...
    def distance(self) -> int: ...
    def facts(self) -> ActorFacts: ...


class BoundMethod:
    """A method of a handle."""

    __slots__ = ("_spec", "_target")

    def __init__(self, target: CallTarget, spec: MethodSpec) -> None:
        self._target = target
        self._spec = spec

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._spec.is_stream:
            return self._target.stream(self._spec, args, kwargs)
        return self._target.call(self._spec, args, kwargs)

    def tell(self, /, *args: Any, **kwargs: Any) -> None:
        """Call without a reply."""
        if self._spec.is_stream:
            raise TypeError(f"{self._spec.label} is a stream: there is nothing to tell it")
        self._target.tell(self._spec, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = self._spec.signature
        if signature is None:
            raise AttributeError(f"{self!r} has no signature")
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # the method's own, not that of this class
        return self._spec.fn.__doc__

    @property
    def __name__(self) -> str:
        return self._spec.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._spec.fn

    def __repr__(self) -> str:
        return f"<remote method {self._spec.label}{signature_of(self.__call__) or ''}>"

    def __reduce__(self) -> NoReturn:
        label = self._spec.label
        raise TypeError(f"{label} stays in its process: pass the actor's handle, and call the method on that")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # In Ray and Monarch, methods have methods.
            spec = self._spec
            raise AttributeError(
                f"{spec.label} has no {name!r}: `handle.{spec.name}(...)` calls it, and gives a ref to await"
            )


def _class_for(spec: MethodSpec) -> type[BoundMethod]:
    """The class for one method. Its `__call__` has the signature of the method, which notebooks show, too."""
    if spec.bound is None:
        call = FunctionType(BoundMethod.__call__.__code__, globals(), "__call__")
        vars(call)["__wrapped__"] = spec.fn
        own = {"__slots__": (), "__call__": call, "__doc__": vars(BoundMethod)["__doc__"]}
        spec.bound = type("BoundMethod", (BoundMethod,), own)
    return cast("type[BoundMethod]", spec.bound)


def local(method: DefMethod[P, R], /) -> Callable[P, R]:
    """Tell a type checker that a `def` method is called on `self`: `local(self.loss)(batch)` is `self.loss(batch)`.

    Inside its class, a method called on `self` or `super()` is a plain function: it runs in place, and a `def` method
    gives its result, not a ref. Type checkers cannot tell `self` from a handle and assume a remote call. Does nothing
    at run time. An `async def` method does not need it: `await self.load()` is correct.

    Raises:
        TypeError: The method is that of a handle: its result is in another process.
    """
    if isinstance(method, BoundMethod):
        raise TypeError(f"{method._spec.label} runs in another process: call it, and await the ref")
    return cast("Callable[P, R]", method)


class Handle:
    """The result of `spawn`: to type checkers an instance of the actor class. Can be sent to other processes."""

    def __init__(self, target: CallTarget, cls: type) -> None:
        self.__dict__["_target"] = target
        self.__dict__["_class"] = cls

    def __getattr__(self, name: str) -> Any:
        cls: type = self.__dict__["_class"]
        spec = specs_of(cls).get(name)
        if spec is None:
            raise AttributeError(_why_no_method(cls, name))
        bound = self.__dict__[name] = _class_for(spec)(self.__dict__["_target"], spec)
        return bound

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{self!r} is a handle: its state is in another process; give the class a method to set {name!r}"
        )

    def __dir__(self) -> list[str]:
        return sorted(specs_of(self.__dict__["_class"]))

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # that of the actor, not that of this class
        own = inspect.getdoc(self.__wrapped__)
        about = self.__wrapped__.__name__ if own is None or own == inspect.getdoc(Actor) else own
        methods = [f"    {name}{signature_of(getattr(self, name)) or '(...)'}" for name in dir(self)]
        return "\n".join([about, "", "Remote methods:", *methods])

    @property
    def __wrapped__(self) -> type:
        cls: type = self.__dict__["_class"]
        return cls

    def __repr__(self) -> str:
        return f"<{self.__dict__['_class'].__name__} {self.__dict__['_target']}>"

    def _repr_html_(self) -> str:
        methods = [getattr(self, name) for name in dir(self)]
        rows = [
            (f"{one.__name__}{signature_of(one) or '(...)'}", (one.__doc__ or "").partition("\n")[0]) for one in methods
        ]
        about = facts(target_of(self).facts()._asdict())
        return page(self.__wrapped__.__name__, about, table(["method", ""], rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and bool(self.__dict__["_target"] == other.__dict__["_target"])

    def __hash__(self) -> int:
        return hash(self.__dict__["_target"])

    def __reduce__(self) -> tuple[Any, ...]:
        return target_of(self).reduce(self.__dict__["_class"])


def target_of(handle: object) -> CallTarget:
    """The target of a handle.

    Raises:
        TypeError: It is no handle.
    """
    if not isinstance(handle, Handle):
        hint = ": did you forget `await`?" if hasattr(type(handle), "__await__") else ""
        raise TypeError(f"expected an actor's handle, got {type(handle).__name__}{hint}")
    return cast("CallTarget", handle.__dict__["_target"])


def handle_of(actor: object) -> object:
    """The handle of an actor or a service. A handle itself may have a method of that name."""
    return actor if isinstance(actor, Handle) else getattr(actor, "handle", actor)


def class_of(handle: object) -> type:
    """The actor class of a handle."""
    target_of(handle)
    return cast("type", cast("Handle", handle).__dict__["_class"])


def _why_no_method(cls: type, name: str) -> str:
    found = inspect.getattr_static(cls, name, None)
    if callable(found):
        return f"{cls.__name__}.{name} is not a remote method: decorate it with @aiodaft.method"
    if found is not None:
        return f"{cls.__name__}.{name} is not a method; a handle reaches methods only"
    known = ", ".join(sorted(specs_of(cls))) or "none"
    return f"{cls.__name__} has no method {name!r}; its remote methods: {known}"
