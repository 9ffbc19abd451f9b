"""The blueprint of an actor: its class and arguments, the conditions for its place, and its reserved share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.node.resources import Demand, Wish
from aiodaft._protocol.supervision import Kind, Restart
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.worker import Tenant
from aiodaft._runtime.placing import FixedSites, Site
from aiodaft._runtime.supervision.child_spec import Enrolment


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
    within: FixedSites[NodeAgent] | None = None

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
        """The patience with an actor of this class; None where neither `on` nor the class line gives one."""
        return self.patience or getattr(cls, "__aiodaft_patience__", None)


class Blueprint(NamedTuple):
    """An actor to be made: its class, the arguments of its constructor, and those of `on(...)`."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    constraints: Constraints

    @property
    def demand(self) -> Demand:
        return self.constraints.demand(self.cls)

    @property
    def max_queue(self) -> int | None:
        return self.constraints.max_queue or getattr(self.cls, "__aiodaft_max_queue__", None)


class Reserved(NamedTuple):
    """The share of an actor that is not made yet, and the node or slice that has reserved it."""

    site: Site[NodeAgent]
    wish: Wish[Tenant]


class Seat(NamedTuple):
    """The place of one member in a group."""

    label: str
    reserved: Reserved
    enrolment: Enrolment
