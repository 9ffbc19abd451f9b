"""The choice of a node for an actor, a gang of actors or a mesh, from views of the nodes, which may be old. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiodaft._protocol.node.resources import Demand, Stock

# Chooses nodes. The nodes themselves decide whether a plan can be reserved. Pure and deterministic.
#
# Like actors are packed: onto the fewest nodes, and of these the fullest ones that have room, so that large requests
# still find empty nodes. Actors that need no GPU prefer nodes without any. Actors that need nothing that is counted go
# where the fewest actors per CPU are. With `spread`, as few as possible share a node, and the emptiest nodes come
# first. Among equals, the order of the views decides.

_LISTED: Final = 3


def obstacle(node: NodeView, where: Where) -> str | None:
    """The constraint that keeps a request from a node, in words that fit several nodes."""
    if where.node not in {None, node.name}:
        return f"not named {where.node!r}"
    if node.draining:
        return "being drained"
    for key, value in where.labels.items():
        if (has := node.labels.get(key)) != value:
            return f"no label {key!r}" if has is None else f"{key}={has!r}"
    if where.near and all(anchor.node != node.name for anchor in where.near):
        return f"not near {_anchors(where.near)}"
    if beside := [anchor for anchor in where.apart_from if anchor.node == node.name]:
        return f"{_listed(anchor.label for anchor in beside)} there"
    return None


def explain(nodes: Sequence[NodeView], request: Request) -> str:
    """Why these nodes cannot take a request.

    Each constraint is named with the nodes that fail it; of those that fail only for want of resources, those with
    the most room are described.
    """
    where = request.where
    if not nodes:
        return f"{request.label} cannot be placed: there is no node"
    if where.node is not None and all(node.name != where.node for node in nodes):
        return f"{request.label} cannot be placed: there is no node {where.node!r}; there is {_names(nodes)}"
    groups: dict[str, list[NodeView]] = {}
    allowed: list[NodeView] = []
    for node in nodes:
        obstructed = obstacle(node, where)
        if obstructed is None:
            allowed.append(node)
        elif where.node in {None, node.name}:
            groups.setdefault(obstructed, []).append(node)
    parts = [f"{_names(failing)}: {why}" for why, failing in groups.items()]
    rooms = {node.name: request.room_on(node.stock) for node in allowed}
    parts += _short_of(allowed, request, rooms)
    return f"{_wish(request)}, but {_most(request, sum(rooms.values()))}: {'; '.join(parts)}"


def _most(request: Request, room: int) -> str:
    if request.count == 1 or not room:
        return "no node has that"
    if request.own_nodes:
        return f"only {room} {'node has' if room == 1 else 'nodes have'} that"
    return f"there is room for {room}"


def _wish(request: Request) -> str:
    demand, where = request.demand, request.where
    amounts = {"cpus": demand.cpus, "gpus": demand.gpus, **demand.custom}
    wants = [f"{name}={amount:g}" for name, amount in amounts.items() if amount]
    if where.node is not None:
        wants.append(f"the node {where.node!r}")
    if where.labels:
        wants.append(f"labels={dict(where.labels)!r}")
    if where.near:
        wants.append(f"a node near {_anchors(where.near)}")
    if where.apart_from:
        wants.append(f"a node apart from {_anchors(where.apart_from)}")
    what = " and ".join(wants) or "a node"
    if request.own_nodes:
        return f"{request.label} needs {request.count} nodes with {what} each"
    if request.count > 1:
        return f"each of the {request.count} actors {request.label} needs {what}"
    return f"{request.label} needs {what}"


def _short_of(nodes: Sequence[NodeView], request: Request, rooms: Mapping[str, int]) -> list[str]:
    parts: list[str] = []
    for node in sorted(nodes, key=lambda node: -rooms[node.name])[:_LISTED]:
        missing = _missing(node.stock, request.demand)
        parts.append(f"{node.name}: {missing or f'room for {rooms[node.name]}'}")
    if len(nodes) > _LISTED:
        parts.append(f"no more room on the other {len(nodes) - _LISTED}")
    return parts


def _missing(stock: Stock, demand: Demand) -> str:
    for name, amount in {"cpus": demand.cpus, **demand.custom}.items():
        alone = Demand(cpus=amount) if name == "cpus" else Demand(custom={name: amount})
        if amount and not stock.room_for(alone, 1):
            return f"{stock.free.get(name, 0.0):g} {name} free of {stock.totals.get(name, 0.0):g}"
    if not demand.gpus or stock.room_for(Demand(gpus=demand.gpus), 1):
        return ""
    if demand.gpus < 1:
        return f"no more than {max(stock.gpus, default=0.0):g} of any of its {len(stock.gpus)} GPUs free"
    return f"{stock.whole_gpus} whole gpus free of {len(stock.gpus)}"


def _anchors(anchors: Iterable[Anchor]) -> str:
    return _listed(f"{anchor.label} (on {anchor.node})" for anchor in anchors)


def _names(nodes: Iterable[NodeView]) -> str:
    return _listed(node.name for node in nodes)


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    if len(found) <= _LISTED + 1:
        return " and ".join(filter(None, [", ".join(found[:-1]), *found[-1:]]))
    return f"{', '.join(found[:_LISTED])} and {len(found) - _LISTED} more"


class NodeState(NamedTuple):
    stock: Stock
    actors: int = 0
    revision: int = 0
    draining: bool = False


class NodeView(NamedTuple):
    name: str
    labels: Mapping[str, str]
    stock: Stock
    actors: int = 0
    revision: int = 0
    draining: bool = False


class Anchor(NamedTuple):
    label: str
    node: str


@dataclass(frozen=True, slots=True)
class Where:
    node: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    near: tuple[Anchor, ...] = ()
    apart_from: tuple[Anchor, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request for places: for like actors, or the slices of a mesh; all of them or none.

    Attributes:
        spread: They go to the emptiest nodes instead of the fullest ones that have room.
        own_nodes: Each needs a node without the others, as the slices of a mesh do.
    """

    label: str
    demand: Demand
    count: int = 1
    where: Where = Where()
    spread: bool = False
    own_nodes: bool = False

    def room_on(self, stock: Stock) -> int:
        return stock.room_for(self.demand, 1 if self.own_nodes else self.count)


class Unplaceable(NamedTuple):
    """Why a request cannot be met; `never`: not even if nothing were in use."""

    reason: str
    never: bool


def plan(nodes: Sequence[NodeView], request: Request) -> tuple[str, ...] | Unplaceable:
    """The names of the nodes for each member of a request in the order of ranks, or why there are none."""
    allowed = [node for node in nodes if obstacle(node, request.where) is None]
    rooms = {node.name: request.room_on(node.stock) for node in allowed}
    if sum(rooms.values()) < request.count:
        most = sum(request.room_on(node.stock.all_free()) for node in allowed)
        return Unplaceable(explain(nodes, request), never=most < request.count)
    fitting = [node for node in allowed if rooms[node.name]]
    if request.own_nodes:
        return _on_own_nodes(fitting, request)
    if request.spread:
        return _in_turn(fitting, request, rooms, lambda view, mine: (mine, _used_share(view, request.demand, mine)))
    if not _counts(request.demand):
        return _in_turn(fitting, request, rooms, lambda view, mine: ((view.actors + mine + 1) / _cpus(view.stock), 0.0))
    return _packed(fitting, request, rooms)


def _packed(nodes: Iterable[NodeView], request: Request, rooms: dict[str, int]) -> tuple[str, ...]:
    left, chosen = list(nodes), list[str]()
    while (missing := request.count - len(chosen)) > 0:
        enough = [node for node in left if rooms[node.name] >= missing]
        if enough:
            best = min(enough, key=lambda node: _fullness(node, request))
        else:
            best = max(left, key=lambda node: rooms[node.name])
        chosen += [best.name] * min(missing, rooms[best.name])
        left.remove(best)
    return tuple(chosen)


def _on_own_nodes(nodes: Iterable[NodeView], request: Request) -> tuple[str, ...]:
    def rank(node: NodeView) -> tuple[float, ...]:
        return (_used_share(node, request.demand, 0),) if request.spread else _fullness(node, request)

    best = {node.name for node in sorted(nodes, key=rank)[: request.count]}
    return tuple(node.name for node in nodes if node.name in best)


def _in_turn(
    nodes: Sequence[NodeView],
    request: Request,
    rooms: dict[str, int],
    rank: Callable[[NodeView, int], tuple[float, float]],
) -> tuple[str, ...]:
    """The rank of a node may change with its members."""
    heap = [(rank(node, 0), index, 0) for index, node in enumerate(nodes)]
    heapq.heapify(heap)
    chosen: list[str] = []
    while len(chosen) < request.count:
        _, index, mine = heapq.heappop(heap)
        node = nodes[index]
        chosen.append(node.name)
        if mine + 1 < rooms[node.name]:
            heapq.heappush(heap, (rank(node, mine + 1), index, mine + 1))
    return tuple(chosen)


def _fullness(node: NodeView, request: Request) -> tuple[float, ...]:
    spares_gpus = node.stock.gpus and not request.demand.gpus
    # A bound keeps demands of next to nothing comparable.
    room = node.stock.room_for(request.demand, 1_000_000)
    return bool(spares_gpus), room, -_used_share(node, request.demand, 0)


def _used_share(node: NodeView, demand: Demand, mine: int) -> float:
    stock = node.stock
    needs = {"cpus": demand.cpus, "gpus": demand.gpus, **demand.custom}
    free = {**stock.free, "gpus": sum(stock.gpus)}
    shares = [
        1 - (free[name] - mine * amount) / stock.totals[name]
        for name, amount in needs.items()
        if amount and stock.totals.get(name)
    ]
    return max(shares) if shares else (node.actors + mine) / _cpus(stock)


def _counts(demand: Demand) -> bool:
    return any((demand.cpus, demand.gpus, *demand.custom.values()))


def _cpus(stock: Stock) -> float:
    return max(1.0, stock.totals.get("cpus", 0.0))
