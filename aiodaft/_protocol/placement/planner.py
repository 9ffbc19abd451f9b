"""Chooses nodes. The nodes themselves decide whether a plan can be reserved. Pure and deterministic.

Like actors are packed: onto the fewest nodes, and of these the fullest ones that have room, so that large requests
still find empty nodes. Actors that need no GPU prefer nodes without any. Actors that need nothing that is counted go
where the fewest actors per CPU are. With `spread`, as few as possible share a node, and the emptiest nodes come first.
Among equals, the order of the views decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from aiodaft._protocol.node.resources import Demand, Stock
from aiodaft._protocol.placement.reasons import explain, obstacle
from aiodaft._protocol.placement.request import NodeView, Request


class Unplaceable(NamedTuple):
    """Why a request cannot be met.

    Attributes:
        reason: The constraints, and which nodes fail them why.
        never: Whether these nodes could not even meet it if nothing were in use.
    """

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
    """Place one member after the other on the node with the lowest rank, which may change with its members."""
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
    """Lower for nodes that are the better filled up."""
    spares_gpus = node.stock.gpus and not request.demand.gpus
    # The number of actors that would fit, up to a bound that keeps demands of next to nothing comparable.
    room = node.stock.room_for(request.demand, 1_000_000)
    return bool(spares_gpus), room, -_used_share(node, request.demand, 0)


def _used_share(node: NodeView, demand: Demand, mine: int) -> float:
    """The used share of the scarcest resource of a demand, of which `mine` more are there; of CPUs if it needs none."""
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
