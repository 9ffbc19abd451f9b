"""The owner's side of placement: plans with views of the nodes, which may be old, and has the nodes chosen reserve.

A node that refuses, or is out of reach, is looked at again, and the plan is made anew: the answer of a node is the
truth.
A node that does not answer at once is waited for only if there is no room elsewhere.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from aiodaft._protocol.node.resources import Demand, Stock, Wish
from aiodaft._protocol.node.worker import Patience
from aiodaft._protocol.numbers import is_number
from aiodaft._protocol.placement import NodeView, Request, Unplaceable, explain, obstacle, plan
from aiodaft._protocol.supervision import Kind, Restart
from aiodaft._runtime.node.nodes import Nodes, Site
from aiodaft._runtime.node.worker import Tenant
from aiodaft.exceptions import DaftError, InsufficientResources, OutcomeUnknown

T = TypeVar("T")

_NOTHING: Final = Stock({}, {}, ())
# Seconds within which a node answers; after which one that does not say what it has is out of reach.
_PROMPT: Final = 0.5
_PATIENCE: Final = 10.0
# Members that the only node is asked for without a look at its free resources.
_FEW: Final = 64


class FixedSites(NamedTuple):
    sites: tuple[Site, ...]

    def known(self) -> tuple[Site, ...]:
        return self.sites

    def differ(self, known: Sequence[Site]) -> None:
        return None


class Constraints(NamedTuple):
    """The arguments of `on(...)`; None where none was given."""

    cpus: float | None = None
    gpus: float | None = None
    resources: Mapping[str, float] | None = None
    node: str | None = None
    beside: Any = None
    patience: Patience | None = None
    restart: Restart | Kind | None = None
    max_queue: int | None = None
    labels: Mapping[str, str] | None = None
    near: tuple[Any, ...] = ()
    apart_from: tuple[Any, ...] = ()
    spread: bool = False
    wait: float | None = None
    name: str | None = None
    lifetime: str | None = None
    # The slices of a mesh; None: the nodes.
    within: FixedSites | None = None
    env: Mapping[str, str] | None = None
    cwd: str = ""
    python: str = ""

    @property
    def is_named(self) -> bool:
        return self.name is not None or self.lifetime is not None

    def demand(self, cls: type) -> Demand:
        base: Demand = getattr(cls, "__aiodaft_demand__", Demand())
        if self.beside is not None:
            # An actor in another actor's process uses that process's GPUs.
            base = replace(base, gpus=0)
        return Demand(
            cpus=base.cpus if self.cpus is None else self.cpus,
            gpus=base.gpus if self.gpus is None else self.gpus,
            custom=base.custom if self.resources is None else dict(self.resources),
        )

    def patience_with(self, cls: type) -> Patience | None:
        return self.patience or getattr(cls, "__aiodaft_patience__", None)


def check_where(node: object, labels: object, spread: object, wait: object) -> None:
    """Raise TypeError or ValueError for constraints that no node could meet."""
    if node is not None and not isinstance(node, str):
        raise TypeError(f"node={node!r:.80}: the name of a node is a string")
    if labels is not None:
        check_labels(labels)
    if not isinstance(spread, bool):
        raise TypeError(f"spread={spread!r:.80}: True or False is needed")
    if wait is None:
        return
    if isinstance(wait, bool) or not isinstance(wait, int | float):
        raise TypeError(f"wait={wait!r:.80}: a number of seconds is needed")
    if not is_number(wait):
        raise ValueError(f"wait={wait!r}: a number of seconds that is not negative is needed")


def check_labels(labels: object) -> Mapping[str, str]:
    """Return labels; raise TypeError unless they map strings to strings."""
    return _check_texts("labels", labels, {"zone": "a"})


def _check_texts(option: str, texts: object, example: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(texts, Mapping):
        raise TypeError(f"{option}={texts!r:.80}: a dict is needed, such as {example}")
    for key, value in texts.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"{option}: {key!r:.80}: {value!r:.80} is not a string with a string")
    return texts


def check_surroundings(
    env: Mapping[str, str] | None, cwd: str | os.PathLike[str], python: str | os.PathLike[str]
) -> tuple[Mapping[str, str] | None, str, str]:
    """Return variables, an absolute path, and one of an interpreter or its name. Raises TypeError, ValueError."""
    if env is not None:
        _check_texts("env", env, {"NAME": "value"})
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: {name!r:.80} is no name of a variable, or its value has a null character")
    for option, path in (("cwd", cwd), ("python", python)):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"{option}={path!r:.80}: a path is needed")
    folder, interpreter = os.fspath(cwd), os.fspath(python)
    # Not its real path: an environment is where the link is.
    of_path = interpreter if os.sep not in interpreter else os.path.abspath(interpreter)
    return env and dict(env), folder and os.path.abspath(folder), of_path


def items_of(each: object) -> list[Any] | None:
    """Return the items of members; raise TypeError unless there may be several."""
    if isinstance(each, str | bytes) or not (each is None or isinstance(each, Iterable)):
        raise TypeError(f"each={each!r:.80}: items are needed, one for each member")
    return None if each is None else list(each)


class Blueprint(NamedTuple):
    """An actor to be made: its class, the arguments of its constructor, and those of `on(...)`."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    constraints: Constraints
    # Of a group: an item for each rank, the first argument of its constructor.
    each: Sequence[Any] | None = None

    def check_size(self, n: int) -> None:
        if self.each is not None and n > len(self.each):
            raise ValueError(f"each has {len(self.each)} items: too few for a group of {n} members")

    def of_rank(self, rank: int, constraints: Constraints) -> Blueprint:
        args = self.args if self.each is None else (self.each[rank], *self.args)
        return self._replace(args=args, constraints=constraints)

    @property
    def demand(self) -> Demand:
        return self.constraints.demand(self.cls)

    @property
    def max_queue(self) -> int | None:
        return self.constraints.max_queue or getattr(self.cls, "__aiodaft_max_queue__", None)


class Reserved(NamedTuple):
    """The share of an actor that is not made yet, and the node or slice that has reserved it."""

    site: Site
    wish: Wish[Tenant]


class Waiting(NamedTuple):
    """The time to wait for resources that are in use, and the event that ends the wait early."""

    seconds: float
    over: asyncio.Event


# Reserves the members with these ranks on a site, all of them or none; gives a result for each.
Attempt: TypeAlias = Callable[[Site, Sequence[int]], Awaitable[Sequence[T]]]
# Has a site take that back, before its next request; also if it is not known whether it has reserved anything.
Undo: TypeAlias = Callable[[Site, Sequence[int]], object]


class Order(NamedTuple, Generic[T]):
    request: Request
    sites: Nodes | FixedSites
    attempt: Attempt[T]
    undo: Undo


class Refusal(NamedTuple):
    site: Site
    members: int
    error: DaftError


class _Search:
    def __init__(self, request: Request, known: Sequence[Site], allowed: Sequence[Site]) -> None:
        self.request = request
        self.known = known
        self.allowed = allowed
        # Sites that refuse although their view has room, as if another runtime has their GPUs; and why.
        self.refused: dict[str, str] = {}
        # The answers of sites for this order.
        self.views: dict[str, NodeView] = {}

    @property
    def sliced(self) -> bool:
        """Whether the sites are slices, the views of which are not kept."""
        return any(site.within is not None for site in self.known)

    def take(self, answers: Mapping[str, NodeView | None]) -> None:
        self.views |= _there(answers)
        self.refused |= {name: "it is out of reach" for name, view in answers.items() if view is None}

    def left(self) -> list[Site]:
        return [site for site in self.allowed if site.name not in self.refused]

    def reason(self, views: Mapping[str, NodeView]) -> str:
        seen = [views.get(site.name, site.unseen()) for site in self.known if site.name not in self.refused]
        parts = [explain(seen, self.request)] if seen else []
        return "; ".join(parts + [f"{name}: {text}" for name, text in self.refused.items()])


class Placing:
    def __init__(self, start: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]) -> None:
        self._start = start
        # The last view of each node, with the plans made since.
        self._seen: dict[str, NodeView] = {}
        # The questions that nodes, or slices of them, have not answered at once.
        self._late: dict[tuple[str, Any], asyncio.Task[NodeView | None]] = {}
        # Plans are made in turn, so that each takes account of those before it.
        self._planning = asyncio.Lock()

    def learn(self, view: NodeView) -> None:
        self._seen[view.name] = view

    def forget(self, node: str) -> None:
        """Something was given back on a node, or it is gone: ask it before the next plan. Idempotent."""
        self._seen.pop(node, None)

    async def place(self, order: Order[T], waiting: Waiting | None = None) -> list[tuple[Site, T]]:
        """Reserve an order, all or nothing; returns the site and the result for each rank.

        Args:
            waiting: The time to wait until there is room. Without it, there is an error at once; and so there is if
                the sites could not even have room if nothing were in use.

        Raises:
            InsufficientResources: The constraints cannot be met; nothing is reserved.
            Exception: An error of an attempt; nothing is reserved.

        Cancellation: nothing is reserved.
        """
        if waiting is None:
            return await self._try(order, order.sites.known())
        deadline = asyncio.get_running_loop().time() + waiting.seconds
        while True:
            known = order.sites.known()
            allowed = [site for site in known if _is_allowed(site, order.request)]
            views = _there(await self._look(allowed))
            try:
                return await self._try(order, known)
            except InsufficientResources as error:
                if waiting.over.is_set():
                    raise
                differ = order.sites.differ(known)
                if differ is None and _never(views.values(), order.request):
                    raise
                views = self._seen | views
                seen = [(site, views[site.name].revision) for site in allowed if site.name in views]
                if not await self._change(seen, differ, waiting.over, deadline):
                    raise InsufficientResources(f"{error} (waited {waiting.seconds:g} s)") from None

    async def _change(
        self,
        seen: Sequence[tuple[Site, int]],
        differ: Coroutine[Any, Any, None] | None,
        over: asyncio.Event,
        deadline: float,
    ) -> bool:
        """Wait until something was given back at one of these sites; False if that takes too long."""

        async def changed(site: Site, revision: int) -> None:
            # If the node is lost, its actors are, too: plan again.
            with suppress(DaftError):
                await site.agent.changed(revision)

        waits = [changed(site, revision) for site, revision in seen]
        waits += [wait for wait in (differ, _set(over)) if wait is not None]
        tasks = [self._start(wait, "wait for resources") for wait in waits]
        try:
            left = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return bool(done)

    async def _try(self, order: Order[T], known: Sequence[Site]) -> list[tuple[Site, T]]:
        """Plan and reserve, until that succeeds or the nodes' own answers leave nothing to be planned."""
        request = order.request
        allowed = [site for site in known if _is_allowed(site, request)]
        if not allowed:
            raise InsufficientResources(explain([site.unseen() for site in known], request))
        search = _Search(request, known, allowed)
        while True:
            if len(allowed) == 1 and not (request.own_nodes and request.count > 1) and request.count <= _FEW:
                chosen = {allowed[0].name: list(range(request.count))}
            else:
                async with self._planning:
                    found = await self._choose(search)
                if found is None:
                    # Others plan meanwhile.
                    search.take(await self._look(search.left(), patient=True))
                    continue
                chosen = found
            outcome = await self._reserve(order, [site for site in allowed if site.name in chosen], chosen)
            if not isinstance(outcome, Refusal):
                return outcome
            if len(allowed) == 1:
                raise outcome.error
            await self._look_again(search, outcome)

    async def _look_again(self, search: _Search, refusal: Refusal) -> None:
        site = refusal.site
        self.forget(site.name)
        if isinstance(refusal.error, InsufficientResources):
            search.take(await self._look([site], patient=True))
            view = search.views.get(site.name)
            if view is not None and search.request.room_on(view.stock) < refusal.members:
                return
        search.refused[site.name] = str(refusal.error)

    async def _choose(self, search: _Search) -> dict[str, list[int]] | None:
        """The ranks for each site that is chosen; None if that depends on sites that have not answered."""
        request = search.request
        while True:
            cached = search.views if search.sliced else self._seen
            search.take(await self._look([site for site in search.left() if site.name not in cached]))
            views = search.views if search.sliced else search.views | self._seen
            left = search.left()
            found = plan([views[site.name] for site in left if site.name in views], request)
            if not isinstance(found, Unplaceable):
                break
            stale = [site.name for site in left if site.name in views and site.name not in search.views]
            for name in stale:
                self.forget(name)
            if not stale and all(site.name in views for site in left):
                raise InsufficientResources(search.reason(views))
            if not stale:
                return None
        chosen: dict[str, list[int]] = {}
        for rank, name in enumerate(found):
            chosen.setdefault(name, []).append(rank)
        for name, ranks in chosen.items():
            if (view := self._seen.get(name)) is not None:
                stock = view.stock.less(request.demand, len(ranks))
                self._seen[name] = view._replace(stock=stock, actors=view.actors + len(ranks))
        return chosen

    async def _look(self, sites: Sequence[Site], *, patient: bool = False) -> dict[str, NodeView | None]:
        """The views of sites, None for those that are out of reach; without those that are late, unless `patient`."""
        late = self._late
        tasks = {
            (site.name, site.within): late.get((site.name, site.within))
            or self._start(self._view(site), f"look at {site.name}")
            for site in sites
        }
        waited = [task for key, task in tasks.items() if patient or key not in late]
        if waited:
            await asyncio.wait(waited, timeout=None if patient else _PROMPT)
        for key, task in tasks.items():
            if not task.done() and key not in late:
                late[key] = task
                task.add_done_callback(partial(self._came, key))
        return {name: task.result() for (name, _), task in tasks.items() if task.done()}

    def _came(self, key: tuple[str, Any], _: object) -> None:
        del self._late[key]

    async def _view(self, site: Site) -> NodeView | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                view = NodeView(site.name, site.labels, *await site.agent.state(site.within))
        except (DaftError, TimeoutError):
            self.forget(site.name)
            return None
        if site.within is None:
            self.learn(view)
        return view

    async def _reserve(
        self, order: Order[T], sites: Sequence[Site], chosen: Mapping[str, Sequence[int]]
    ) -> list[tuple[Site, T]] | Refusal:
        """Reserve on one site after the other, always in the same order: of two owners, one gets ahead."""
        results: dict[int, tuple[Site, T]] = {}
        begun: list[Site] = []
        for site in sites:
            ranks = chosen[site.name]
            begun.append(site)
            try:
                found = await order.attempt(site, ranks)
            except BaseException as error:
                if isinstance(error, InsufficientResources):
                    # That reserved nothing.
                    begun.pop()
                for touched in begun:
                    self.forget(touched.name)
                    order.undo(touched, chosen[touched.name])
                if isinstance(error, InsufficientResources | OutcomeUnknown):
                    return Refusal(site, len(ranks), error)
                raise
            results |= {rank: (site, result) for rank, result in zip(ranks, found, strict=True)}
        return [results[rank] for rank in range(order.request.count)]


def _is_allowed(site: Site, request: Request) -> bool:
    return obstacle(site.unseen(), request.where) is None


def _there(answers: Mapping[str, NodeView | None]) -> dict[str, NodeView]:
    return {name: view for name, view in answers.items() if view is not None}


def _never(views: Iterable[NodeView], request: Request) -> bool:
    """Whether these nodes could not even have room if nothing were in use."""
    found = plan([view._replace(stock=view.stock.all_free()) for view in views], request)
    return isinstance(found, Unplaceable)


async def _set(event: asyncio.Event) -> None:
    await event.wait()
