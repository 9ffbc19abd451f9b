"""Why nodes cannot take a request, in words: short, however many nodes there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from aiodaft._protocol.node.resources import Demand, Stock
from aiodaft._protocol.placement.request import Anchor, NodeView, Request, Where

# Names that an error lists; it counts the others.
_LISTED: Final = 3


def obstacle(node: NodeView, where: Where) -> str | None:
    """The constraint that keeps a request from a node, in words that fit several nodes; None if none does."""
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
    """The free resources of the nodes that no constraint excludes, those with the most room first."""
    parts: list[str] = []
    for node in sorted(nodes, key=lambda node: -rooms[node.name])[:_LISTED]:
        missing = _missing(node.stock, request.demand)
        parts.append(f"{node.name}: {missing or f'room for {rooms[node.name]}'}")
    if len(nodes) > _LISTED:
        parts.append(f"no more room on the other {len(nodes) - _LISTED}")
    return parts


def _missing(stock: Stock, demand: Demand) -> str:
    """The resource that keeps even one actor from a node; empty if one has room."""
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
