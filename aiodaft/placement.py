"""Spawning and placement: `rt.on(gpus=1, with_=other).spawn(Model, ...)`."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast

from aiodaft._protocol.calls.mailbox import check_max_queue
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.supervision.supervision import Kind, Restart, check_alone
from aiodaft._runtime.scope_actors import Constraints
from aiodaft.actor import Actor, Handle
from aiodaft.group import Group
from aiodaft.methods import signature_of
from aiodaft.service import Service, ServiceGroup

__all__ = ["Placement", "Spawned"]

P = ParamSpec("P")
T = TypeVar("T")
ActorT = TypeVar("ActorT", bound=Actor)


class Spawned(Generic[T]):
    """What spawning returns: await it for the handle, or use it as a context manager that also stops the actor.

    Nothing happens before. Cancellation: an actor that is being made is taken back.
    """

    def __init__(
        self, what: str, start: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[T], Awaitable[None]]
    ) -> None:
        self._what = what
        self._start: Callable[[], Coroutine[Any, Any, T]] | None = start
        self._stop = stop
        self._started: list[T] = []

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begin().__await__()

    async def __aenter__(self) -> T:
        self._started.append(await self._begin())
        return self._started[0]

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stop(self._started.pop())

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._start is None:
            raise RuntimeError(f"{self._what} was awaited already; each call spawns once")
        start, self._start = self._start, None
        return start()

    def __repr__(self) -> str:
        return f"<{self._what}, {'not awaited yet' if self._start is not None else 'awaited'}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{self!r} has no attribute {name!r}: did you forget `await`?")

        def __reduce__(self) -> NoReturn:
            raise TypeError(f"{self!r} is no actor yet: did you forget `await`?")

        def __del__(self) -> None:
            if self.__dict__.get("_start") is not None:
                warnings.warn(f"{self._what} was never awaited", RuntimeWarning, stacklevel=2, source=self)


class SpawningScope(Protocol):
    """What spawning needs of a scope."""

    async def spawn_one(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints, label: str = ""
    ) -> Handle: ...
    async def spawn_group(
        self, n: int, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints
    ) -> Group[Any]: ...
    async def stop(self, actor: object) -> None: ...
    async def stop_group(self, group: Group[Any]) -> None: ...


class Spawner(ABC):
    """What can spawn: a runtime, a scope, a placement."""

    @abstractmethod
    def _spawning(self) -> tuple[SpawningScope, Constraints]:
        """The scope that owns new actors, and their constraints."""

    def on(
        self,
        *,
        cpus: float | None = None,
        gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        node: str | None = None,
        with_: object = None,
        patience: Patience | None = None,
        restart: Restart | Kind | None = None,
        max_queue: int | None = None,
    ) -> Placement:
        """Say where the next actors go.

        Args:
            cpus: CPUs each of them needs. They are counted, and torch, OpenMP and MKL compute with so many threads, at
                least one: `OMP_NUM_THREADS` is set unless you have set it. Without `cpus`, each library takes its own
                default, usually all processors. Overrides the class line.
            gpus: GPUs each of them needs: whole ones are exclusive, a fraction shares one.
            resources: Other things each needs, as declared by `Runtime(resources=...)`.
            node: Name of the machine.
            with_: An actor to share the process with: refs between them cost nothing.
            patience: How long to wait for an actor that does not answer; in a shared process, the longest patience
                counts. Overrides the class line.
            restart: What happens when one of them dies. A policy is for each of them alone, and overrides the class
                line and the scope; "permanent", "transient" or "temporary" changes only that.
            max_queue: Calls of all callers that may wait at each of them: one more is refused at once with
                `Overloaded`. Overrides the class line. Steps of compiled graphs do not count, and are not refused:
                `max_in_flight` bounds them. See also `method`.

        Raises:
            ValueError: An amount is not a number, or negative; or the policy is for siblings.
        """
        scope, _ = self._spawning()
        if restart is not None:
            check_alone(Restart(restart) if isinstance(restart, str) else restart)
        check_max_queue(max_queue, "on")
        constraints = Constraints(cpus, gpus, resources, node, with_, patience, restart, max_queue)
        # Raises for invalid amounts at the caller's line.
        constraints.demand(Actor)
        return Placement(scope, constraints)

    def spawn(self, cls: Callable[P, ActorT], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[ActorT]:
        """Make an actor in a process of its own: `await` it, or use it as `async with`.

        Raises:
            TypeError: `cls` is not an actor class, or the arguments do not fit its constructor. Raised at once; the
                following errors are raised when the result is awaited.
            InsufficientResources: The resources do not exist, or are in use.
            SerializationError: The class or an argument cannot travel.
            SpawnFailed: The process did not start, or cannot import the class.
            Exception: What the constructor raised.
        """
        scope, constraints = self._spawning()
        actor_class = _check_class(cls, args, kwargs, plain="host")

        async def start() -> ActorT:
            return cast("ActorT", await scope.spawn_one(actor_class, args, kwargs, constraints))

        return Spawned(f"spawn({actor_class.__name__})", start, scope.stop)

    def host(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[Service[T]]:
        """Make an instance of any class in a process of its own; `service.call(Class.method, ...)` calls it.

        Raises:
            Exception: As `spawn`.
        """
        scope, constraints = self._spawning()
        hosted_class = _check_class(cls, args, kwargs)

        async def start() -> Service[T]:
            return Service(await scope.spawn_one(hosted_class, args, kwargs, constraints), hosted_class)

        return Spawned(f"host({hosted_class.__name__})", start, lambda service: scope.stop(service.handle))

    def group(self, n: int, cls: Callable[P, ActorT], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[Group[ActorT]]:
        """Make n actors of one class; none if one fails.

        Raises:
            Exception: As `spawn`.
        """
        return self._group("group", n, _check_class(cls, args, kwargs, plain="host_group"), args, kwargs)

    def host_group(self, n: int, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[ServiceGroup[T]]:
        """Make n instances of any class; none if one fails.

        Raises:
            Exception: As `spawn`.
        """
        return self._group("host_group", n, _check_class(cls, args, kwargs), args, kwargs)

    def _group(self, what: str, n: int, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spawned[Any]:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"a group has a positive number of members, not {n!r}")
        scope, constraints = self._spawning()

        def start() -> Coroutine[Any, Any, Group[Any]]:
            return scope.spawn_group(n, cls, args, kwargs, constraints)

        return Spawned(f"{what}({n}, {cls.__name__})", start, scope.stop_group)


class Placement(Spawner):
    """Constraints on new actors; spawn with it as with the runtime."""

    def __init__(self, scope: SpawningScope, constraints: Constraints) -> None:
        self._scope = scope
        self._constraints = constraints

    def _spawning(self) -> tuple[SpawningScope, Constraints]:
        return self._scope, self._constraints


def _check_class(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: str = "") -> type:
    """Return the class; raise TypeError if these arguments do not fit its constructor.

    Args:
        plain: The method for classes that are not actors, which are then refused.
    """
    if not isinstance(cls, type):
        raise TypeError(f"spawning takes a class and its constructor's arguments, not {cls!r:.80}")
    if inspect.isabstract(cls):
        raise TypeError(
            f"{cls.__name__} is abstract: {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))} are missing"
        )
    signature = signature_of(cls)
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}{signature}: {error}") from None
    if plain and not issubclass(cls, Actor):
        raise TypeError(f"{cls.__name__} is not an Actor: derive it from aiodaft.Actor, or use rt.{plain}(...)")
    return cls
