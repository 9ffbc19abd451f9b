"""The input of a placement: views of the nodes, and a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aiodaft._protocol.node.resources import Demand, Stock


class NodeState(NamedTuple):
    """The report of a node, or of a slice of one, on itself; see `NodeView`."""

    stock: Stock
    actors: int = 0
    revision: int = 0
    draining: bool = False


class NodeView(NamedTuple):
    """A node, or a slice of one, as it was at some moment.

    Attributes:
        name: The node.
        labels: Its labels.
        stock: Its resources.
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
    """The place of an actor that others are to be near to, or apart from."""

    label: str
    node: str


@dataclass(frozen=True, slots=True)
class Where:
    """The constraints on the nodes of a request.

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
    """A request for places: for like actors, or the slices of a mesh; all of them or none.

    Attributes:
        label: Its name in errors.
        demand: The needs of each of them.
        count: Their number.
        where: The constraints on their nodes.
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
        return stock.room_for(self.demand, 1 if self.own_nodes else self.count)
