"""What a placement is decided from: views of the nodes, and a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aiodaft._protocol.node.resources import Demand, Stock


class NodeState(NamedTuple):
    """What a node, or a slice of one, says of itself; see `NodeView`."""

    stock: Stock
    actors: int = 0
    revision: int = 0
    draining: bool = False


class NodeView(NamedTuple):
    """A node, or a slice of one, as it was at some moment.

    Attributes:
        name: The node.
        labels: Its labels.
        stock: What it has.
        actors: The number of its actors.
        revision: A number that grows whenever something was given back there.
        draining: Whether it takes nothing new any more.
    """

    name: str
    labels: Mapping[str, str]
    stock: Stock
    actors: int = 0
    revision: int = 0
    draining: bool = False


class Anchor(NamedTuple):
    """Where an actor is that others are to be near to, or apart from."""

    label: str
    node: str


@dataclass(frozen=True, slots=True)
class Where:
    """Which nodes are allowed.

    Attributes:
        node: The name of the only one; None allows all.
        labels: Labels that it must have.
        near: One of these must be there; empty allows all.
        apart_from: None of these may be there.
    """

    node: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    near: tuple[Anchor, ...] = ()
    apart_from: tuple[Anchor, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be placed: like actors, or the slices of a mesh; all of them or none.

    Attributes:
        label: Its name in errors.
        demand: What each of them needs.
        count: How many there are.
        where: Which nodes are allowed.
        spread: Whether they go to the emptiest nodes instead of the fullest ones that have room.
        own_nodes: Whether each needs a node without the others, as the slices of a mesh do.
    """

    label: str
    demand: Demand
    count: int = 1
    where: Where = Where()
    spread: bool = False
    own_nodes: bool = False

    def room_on(self, stock: Stock) -> int:
        """How many of them fit on a node."""
        return stock.room_for(self.demand, 1 if self.own_nodes else self.count)
