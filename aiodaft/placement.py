"""Spawning and placement: `rt.on(gpus=1, near=other).spawn(Model, ...)`, `rt.mesh(hosts=2, gpus=8)`."""

from __future__ import annotations

import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Never,
    NoReturn,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_origin,
    overload,
)

from aiodaft._protocol.calls.mailbox import check_max_queue
from aiodaft._protocol.coordination.records import check_name
from aiodaft._protocol.groups.roster import Axes
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.node.worker import Patience
from aiodaft._protocol.numbers import is_count
from aiodaft._protocol.supervision import Backoff, Kind, Restart, check_alone
from aiodaft._runtime.node.nodes import Site
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.placing import Blueprint, Constraints, FixedSites, check_surroundings, check_where, items_of
from aiodaft._runtime.scope_actors import ScopeActors
from aiodaft._runtime.serialization.errors import add_note, frames_of_program
from aiodaft.actor import Actor, Handle, handle_of, target_of
from aiodaft.group import Group
from aiodaft.grouping import spawn_group
from aiodaft.methods import signature_of
from aiodaft.pool import Pool, PoolWorker
from aiodaft.service import Service, ServiceGroup

__all__ = ["Mesh", "Placement", "Slice", "Spawned"]

P = ParamSpec("P")
T = TypeVar("T")
ActorT = TypeVar("ActorT", bound=Actor)
Axis: TypeAlias = Mapping[str, int]
Items: TypeAlias = Iterable[Any]

# Workers of pools hold no state, so none is lost.
_AGAIN: Final = Restart(intensity=None, backoff=Backoff(base=0.01, max=1.0))


class Spawned(Generic[T]):
    """The result of spawning: await it for the handle, or use it as a context manager that also stops the actor.

    Nothing happens before. Cancellation: an actor that is being made is taken back.
    """

    def __init__(
        self, what: str, start: Callable[[], Coroutine[Any, Any, T]], end: Callable[[T, bool], Awaitable[None]]
    ) -> None:
        self._what = what
        self._start: Callable[[], Coroutine[Any, Any, T]] | None = start
        # With whether actors have time for their calls.
        self._end = end
        self._started: list[T] = []

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begin().__await__()

    async def __aenter__(self) -> T:
        self._started.append(await self._begin())
        return self._started[0]

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end(self._started.pop(), error is None)

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._start is None:
            raise RuntimeError(f"{self._what} was awaited already; each call spawns once")
        start, self._start = self._start, None
        return self._shown(start())

    @staticmethod
    async def _shown(starting: Coroutine[Any, Any, T]) -> T:
        """Leave out the runtime's frames of an error: those of the program, and of the constructor, are its own."""
        __tracebackhide__ = True
        try:
            return await starting
        except Exception as error:
            BaseException.with_traceback(error, frames_of_program(error))
            raise

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


class Spawner(ABC):
    """An object that can spawn: a runtime, a scope, a placement."""

    @abstractmethod
    def _spawning(self) -> tuple[ScopeActors, Constraints]:
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
        labels: Mapping[str, str] | None = None,
        near: object = None,
        apart_from: object = None,
        spread: bool = False,
        wait: float | None = None,
        name: str | None = None,
        lifetime: Literal["cluster"] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "",
        python: str | os.PathLike[str] = "",
        **unknown: Never,
    ) -> Placement:
        """Give options for the next actors: their place, needs and policies.

        Args:
            cpus: CPUs each of them needs. They are counted, and torch, OpenMP and MKL compute with so many threads, at
                least one: `OMP_NUM_THREADS` is set unless you have set it. Without `cpus`, each library takes its own
                default, usually all processors. Overrides the class line.
            gpus: GPUs each of them needs: whole ones are exclusive, a fraction shares one.
            resources: Other things each needs, as declared by `Runtime(resources=...)`.
            node: Name of the node, which is a machine.
            with_: An actor to share the process with: refs between them cost nothing. For `group` also a group with at
                least as many members: each new member shares the process of the same rank there.
            patience: The time to wait for an actor that does not answer; in a shared process, the longest patience
                counts. Overrides the class line.
            restart: The policy for their deaths. A policy is for each of them alone, and overrides the class
                line and the scope; "permanent", "transient" or "temporary" changes only that.
            max_queue: Calls of all callers that may wait at each of them: one more is refused at once with
                `Overloaded`. Overrides the class line. Steps of compiled graphs do not count, and are not refused:
                `max_in_flight` bounds them. See also `method`.
            labels: Labels that the node must have, as given by `Runtime(labels=...)`.
            near: An actor, or a group, list or tuple of actors: one of them must be on the same node.
            apart_from: An actor, or a group, list or tuple of actors: none of them may be on the same node.
            spread: Whether to take the emptiest nodes, with as few actors of a group on each as possible. Otherwise
                actors are packed: onto the fewest nodes, the fullest that have room.
            wait: Seconds to wait for resources that are in use. Without it there is an error at once.
            name: The name of the actor, for `lookup`. Spawning raises NameTaken if another actor has it.
            lifetime: "cluster": the actor outlives its program, until it is stopped or its node ends. It needs a name,
                and is not restarted.
            env: Variables, added to those of the program. Actors with variables of their own start new interpreters.
            cwd: Their working directory. Default: that of the program.
            python: Another interpreter, such as "other-venv/bin/python", of the same version of Python: they import its
                packages, and the program's own code. It needs aiodaft, too. Also for actors that they spawn.

        Raises:
            TypeError: An argument is of another type; the message names it.
            ValueError: An amount is not a number, or negative; the policy is for siblings; or a constraint cannot be
                combined with `with_`.
        """
        scope, given = self._spawning()
        for option in unknown:
            known = ", ".join(_OPTIONS)
            raise TypeError(f"on() has no option {option!r}{_instead_of(option)}; its options are {known}")
        if restart is not None:
            check_alone(Restart(restart) if isinstance(restart, str) else restart)
        check_max_queue(max_queue, "on")
        check_where(node, labels, spread, wait)
        env, cwd, python = check_surroundings(env, cwd, python)
        if name is not None:
            check_name(name)
        if lifetime not in {None, "cluster"}:
            raise ValueError(f'lifetime={lifetime!r:.80} is not "cluster"')
        constraints = Constraints(
            cpus, gpus, resources, node, with_, patience, restart, max_queue,
            None if labels is None else dict(labels), _actors_in(near, "near"), _actors_in(apart_from, "apart_from"),
            spread, wait, name, lifetime, given.within, env, cwd, python,
        )  # fmt: skip
        if with_ is not None:
            _check_beside(constraints)
        # Raises for invalid amounts at the caller's line.
        constraints.demand(Actor)
        return Placement(scope, constraints)

    @overload
    def spawn(self, cls: Callable[P, ActorT], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[ActorT]: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    def spawn(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[Service[T]]: ...
    def spawn(self, cls: Any, /, *args: Any, **kwargs: Any) -> Spawned[Any]:
        """Make an actor in a process of its own: `await` it, or use it as `async with`.

        An instance of a class that is no `Actor` is a `Service`: `service.call(Class.method, ...)` calls it.

        Raises:
            TypeError: `cls` is no class, or the arguments do not fit its constructor. Raised at once; the following
                errors are raised when the result is awaited.
            InsufficientResources: No node meets the constraints, or the resources are in use; the message says why.
            ActorDied: The actor that it is to be with or near to is gone.
            SerializationError: The class or an argument cannot travel.
            SpawnFailed: The process did not start, or cannot import the class.
            Exception: The error of the constructor.
        """
        scope, constraints = self._spawning()
        what = Blueprint(_check_class(cls, args, kwargs), args, kwargs, constraints)
        _check_single(constraints)

        async def start() -> Any:
            return _served(await scope.spawn_one(what), what.cls)

        def end(actor: Any, graceful: bool) -> Awaitable[None]:
            return scope.end_block([actor], graceful)

        return Spawned(f"spawn({what.cls.__name__})", start, end)

    @overload
    async def get_or_create(  # type: ignore[overload-overlap]  # the first that fits counts
        self, name: str, cls: Callable[P, ActorT], /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorT: ...
    @overload
    async def get_or_create(
        self, name: str, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Service[T]: ...
    async def get_or_create(self, name: str, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Find the actor with a name, or make it as `spawn` does: of many callers, in any process, only one makes it.

        Raises:
            TypeError: The actor with that name is of another class.
            ValueError: The name is not valid.
            Exception: As `spawn`.

        Cancellation: an actor that is being made is taken back.
        """
        scope, constraints = self._spawning()
        cls = _check_class(cls, args, kwargs)
        constraints = constraints._replace(name=check_name(name))
        _check_single(constraints)
        return _served(await scope.get_or_spawn(Blueprint(cls, args, kwargs, constraints)), cls)

    # Keywords besides a ParamSpec cannot be typed: here the arguments of the constructor are checked at run time.
    @overload
    def group(  # type: ignore[overload-overlap]  # the first that fits counts
        self, n: int, cls: Callable[..., ActorT], /, *args: Any, axes: Axis, each: Items | None = None, **kwargs: Any
    ) -> Spawned[Group[ActorT]]: ...
    @overload
    def group(  # type: ignore[overload-overlap]  # as above
        self, n: int, cls: Callable[..., ActorT], /, *args: Any, each: Items, **kwargs: Any
    ) -> Spawned[Group[ActorT]]: ...
    @overload
    def group(  # type: ignore[overload-overlap]  # as above
        self, n: int, cls: Callable[P, ActorT], /, *args: P.args, **kwargs: P.kwargs
    ) -> Spawned[Group[ActorT]]: ...
    @overload
    def group(
        self, n: int, cls: Callable[..., T], /, *args: Any, axes: Axis, each: Items | None = None, **kwargs: Any
    ) -> Spawned[ServiceGroup[T]]: ...
    @overload
    def group(
        self, n: int, cls: Callable[..., T], /, *args: Any, each: Items, **kwargs: Any
    ) -> Spawned[ServiceGroup[T]]: ...
    @overload
    def group(self, n: int, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Spawned[ServiceGroup[T]]: ...
    def group(  # type: ignore[misc]  # a ParamSpec may have these keywords
        self, n: Any, cls: Any, /, *args: Any, axes: Axis | None = None, each: Items | None = None, **kwargs: Any
    ) -> Any:
        """Make n actors of one class, or services of any; none if one fails, or if there is no room for all.

        Args:
            n: The number of actors.
            cls: The class.
            args: The arguments of the constructor, the same for all; each member finds its rank by `current_group()`.
            axes: Names and sizes of axes, such as `{"dp": 2, "tp": 2}`: the ranks form a grid, row by row. A parameter
                `axes` or `each` of the constructor is given by position.
            each: Items, of which the one of its rank is the first argument of a member's constructor, as for
                `Group.each`. There are at least n; further ones are for members that join later.
            kwargs: The arguments of the constructor, by keyword.

        Raises:
            ValueError: The axes have another number of places than n, or there are fewer items.
            Exception: As `spawn`.
        """
        if isinstance(n, type):
            raise TypeError(f"the number of members comes first: use `rt.group({cls!r:.80}, {n.__name__}, ...)`")
        if not is_count(n):
            raise ValueError(f"a group has a positive number of members, not {n!r}")
        scope, constraints = self._spawning()
        blueprint = Blueprint(cls, args, kwargs, constraints, items_of(each))
        blueprint.check_size(n)
        values = (*args, *kwargs.values())
        with _noting_that_all_get_the_same(n, values):
            cls = _check_class(cls, blueprint.of_rank(0, constraints).args, kwargs)
        if constraints.is_named:
            raise ValueError("on(name=..., lifetime=...) is for one actor, not for a group")
        grid = Axes.of(axes, n)

        async def start() -> Group[Any]:
            with _noting_that_all_get_the_same(n, values):
                return await spawn_group(scope, n, blueprint._replace(cls=cls), grid)

        def end(group: Group[Any], graceful: bool) -> Awaitable[None]:
            return scope.end_block(list(group), graceful)

        return Spawned(f"group({n}, {cls.__name__})", start, end)

    def pool(self, n: int, *, concurrency: int = 1, retries: int = 0) -> Spawned[Pool]:
        """Make n actors that run plain functions: `pool.submit(fn, x)`.

        Args:
            n: The number of workers. Without a policy of `on`, one that dies is restarted, however often.
            concurrency: Tasks that a worker may have under way; more than 1 is of use for `async def` functions.
            retries: The most times that a task is made again whose worker died. Only for functions that may run twice.

        Raises:
            ValueError: A number is not valid. Raised at once; the following errors are raised when it is awaited.
            Exception: As `group`.
        """
        _check_counts("pool", ("n", n, 1), ("concurrency", concurrency, 1), ("retries", retries, 0))
        scope, constraints = self._spawning()
        if constraints.restart is None:
            constraints = constraints._replace(restart=_AGAIN)
        placement = Placement(scope, constraints)

        async def start() -> Pool:
            return Pool(await placement.group(n, PoolWorker), concurrency, retries)

        def end(pool: Pool, graceful: bool) -> Awaitable[None]:
            return scope.end_block(list(pool.group), graceful)

        return Spawned(f"pool({n})", start, end)

    def mesh(self, hosts: int, gpus: int = 0) -> Spawned[Mesh]:
        """Reserve a slice of each of several nodes, on which actors are placed later: all slices or none.

        `on(cpus=..., resources=...)` adds other resources of each slice, and further options of `on` constrain the
        nodes, and bound the wait.

        Args:
            hosts: The number of slices, each on a node of its own.
            gpus: GPUs of each slice.

        Raises:
            ValueError: A number is not valid, or a constraint is one of actors. Raised at once; the following error is
                raised when the result is awaited.
            InsufficientResources: There are not so many nodes with room for a slice.
        """
        scope, constraints = self._spawning()
        _check_counts("mesh", ("hosts", hosts, 1), ("gpus", gpus, 0))
        _check_mesh(constraints)
        demand = Demand(constraints.cpus or 0.0, gpus, dict(constraints.resources or {}))

        async def start() -> Mesh:
            return Mesh(*await scope.carve(hosts, demand, constraints))

        def end(mesh: Mesh, graceful: bool) -> Awaitable[None]:
            return mesh._stop(scope.owner, graceful)

        return Spawned(f"mesh({hosts}, {gpus})", start, end)


class Placement(Spawner):
    """Constraints on new actors; spawn with it as with the runtime."""

    def __init__(self, scope: ScopeActors, constraints: Constraints) -> None:
        self._scope = scope
        self._constraints = constraints

    def _spawning(self) -> tuple[ScopeActors, Constraints]:
        return self._scope, self._constraints


class Slice(Spawner):
    """The share of a mesh on one node; spawn on it as with the runtime.

    Actors take their resources from the slice; a resource that the slice lacks, such as CPUs, from its node.

    Attributes:
        node: The name of the node.
        gpus: The numbers of its GPUs there.
    """

    def __init__(self, scope: ScopeActors, site: Site, gpus: tuple[int, ...]) -> None:
        self._scope = scope
        self._site = site
        self.node = site.name
        self.gpus = gpus

    def _spawning(self) -> tuple[ScopeActors, Constraints]:
        return self._scope, Constraints(within=FixedSites((self._site,)))

    def __repr__(self) -> str:
        return f"<Slice of {self.node}, GPUs {list(self.gpus)}>"


class Mesh(Spawner):
    """Slices of several nodes; spawn on all of them as with the runtime, or on one: `mesh[0].group(8, Shard)`.

    The mesh owns the actors on it: `rt.stop(mesh)`, the end of an `async with` or of the scope stops them and releases
    the slices. A group on the whole mesh fills one slice after the other.

    Attributes:
        slices: The slices.
    """

    def __init__(self, scope: ScopeActors, sites: Sequence[tuple[Site, tuple[int, ...]]]) -> None:
        self._scope = scope
        self._sites = FixedSites(tuple(site for site, _ in sites))
        self.slices = tuple(Slice(scope, site, gpus) for site, gpus in sites)

    def _spawning(self) -> tuple[ScopeActors, Constraints]:
        return self._scope, Constraints(within=self._sites)

    async def _stop(self, owner: Owner, graceful: bool = True) -> None:
        """Stop the actors on it, the last one first or all at once, and release its slices. Idempotent.

        Raises:
            ValueError: It belongs to another runtime.

        Cancellation: the actors are killed, and are gone when this raises.
        """
        mine = self._scope.owner
        if mine is not owner:
            raise ValueError(f"{self!r:.80} belongs to another runtime, that of {mine.process.runtime_name}")
        interrupted = await self._scope.close(graceful=graceful)
        if interrupted is not None:
            raise interrupted

    def __getitem__(self, index: int) -> Slice:
        return self.slices[index]

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __repr__(self) -> str:
        return f"<Mesh of {', '.join(f'{one.node} with {len(one.gpus)} GPUs' for one in self.slices)}>"


def _actors_in(given: object, name: str) -> tuple[object, ...]:
    if given is None:
        return ()
    actors = tuple(given) if isinstance(given, Group | list | tuple) else (given,)
    for actor in actors:
        try:
            target_of(handle_of(actor))
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    return actors


def _check_beside(constraints: Constraints) -> None:
    actor = constraints.beside
    _actors_in(actor if isinstance(actor, Group) else [actor], "with_")
    for name in ("node", "labels", "near", "apart_from", "spread", "env", "cwd", "python"):
        if getattr(constraints, name):
            raise ValueError(f"{name} cannot be combined with with_: the process of {actor!r} has its own")


# The options of `on`, without `self` and unknown ones; and their names elsewhere.
_OPTIONS: Final = list(inspect.signature(Spawner.on).parameters)[1:-1]
_ELSEWHERE: Final = {
    "num_cpus": "rt.on(cpus=...)",
    "num_gpus": "rt.on(gpus=...)",
    "max_restarts": "rt.on(restart=aiodaft.Restart(...))",
    "max_concurrency": "@aiodaft.method(concurrency=...)",
    "max_pending_calls": "rt.on(max_queue=...)",
    "runtime_env": "rt.on(env=..., cwd=..., python=...), and `await rt.ship(path)` for code",
}


def _instead_of(option: str) -> str:
    here = _ELSEWHERE.get(option) or (f"rt.on({option}=...)" if option in _OPTIONS else "")
    return here and f": use `{here}`"


@contextmanager
def _noting_that_all_get_the_same(n: int, values: Sequence[object]) -> Generator[None]:
    """Errors of making n members say so where an argument may have been meant to have a part for each."""
    try:
        yield
    except Exception as error:
        if any(isinstance(value, list | tuple) and len(value) == n for value in values):
            add_note(error, f"each member gets the same arguments, not one of the {n} elements: use `each=[...]`")
        raise


def _check_single(constraints: Constraints) -> None:
    if isinstance(constraints.beside, Group):
        raise ValueError(f"one actor goes beside one actor: give a member, with_=group[0], not {constraints.beside!r}")


def _check_counts(what: str, *options: tuple[str, object, int]) -> None:
    for name, value, least in options:
        if not is_count(value, least):
            raise ValueError(f"{name}={value!r:.80}: a {what} needs a whole number that is at least {least}")


def _check_mesh(constraints: Constraints) -> None:
    if constraints.within is not None:
        raise ValueError("a mesh is not made of slices of another one")
    given = {"gpus": constraints.gpus, "with_": constraints.beside, "patience": constraints.patience,
             "restart": constraints.restart, "max_queue": constraints.max_queue, "name": constraints.name,
             "lifetime": constraints.lifetime, "env": constraints.env, "cwd": constraints.cwd or None,
             "python": constraints.python or None}  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"on({name}=...) is for actors, not for a mesh: give it to `on` of the mesh or a slice")


def _check_class(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type:
    """Return the class, without type arguments; raise TypeError if these arguments do not fit its constructor."""
    cls = get_origin(cls) or cls
    if not isinstance(cls, type):
        raise TypeError(f"spawning takes a class and its constructor's arguments, not {cls!r:.80}")
    if inspect.isabstract(cls):
        raise TypeError(
            f"{cls.__name__} is abstract: {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))} are missing"
        )
    for enter, leave, define in (("__aenter__", "__aexit__", "async def"), ("__enter__", "__exit__", "def")):
        if hasattr(cls, enter) and not hasattr(cls, leave):
            raise TypeError(
                f"{cls.__name__} has {enter} and no {leave}: an actor is left when it is stopped; "
                f"add `{define} {leave}(self, *error)`"
            )
        if hasattr(cls, leave) and not hasattr(cls, enter):
            raise TypeError(
                f"{cls.__name__} has {leave} and no {enter}: an actor is entered before its first call, or not left; "
                f"add `{define} {enter}(self)`, which returns self"
            )
    signature = signature_of(cls)
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            wrong = next((name for name in kwargs if name not in signature.parameters), "")
            raise TypeError(f"{cls.__name__}{signature}: {error}{_instead_of(wrong)}") from None
    return cls


def _served(handle: Handle, cls: type) -> Handle | Service[Any]:
    return handle if issubclass(cls, Actor) else Service(handle, cls)
