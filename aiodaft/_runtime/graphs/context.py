"""The view that graphs have of their process, and the requests of a graph's owner to the other processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, cast

from aiodaft._protocol.graphs.layout import ValueNote
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError


class Tell(Protocol):
    def tell(self, number: int, run: int, why: DaftError, /) -> None: ...


class TellOfEdge(Protocol):
    """Tells an agent, without an answer, that one process sends nothing to another one any more."""

    def tell(self, number: int, process: str, why: DaftError, /) -> None: ...


class GraphAgent(Protocol):
    """The methods of a process's agent that serve graphs; see `Graphs`."""

    @property
    def step_failed(self) -> Tell: ...

    @property
    def run_failed(self) -> Tell: ...

    @property
    def edge_cut(self) -> TellOfEdge: ...

    @property
    def edge_failed(self) -> TellOfEdge: ...

    def install(self, number: int, plan: Opaque, /) -> Awaitable[None]: ...

    def uninstall(self, number: int, /) -> Awaitable[None]: ...

    def graph_notes(self, number: int, /) -> Awaitable[dict[int, ValueNote]]: ...


class GraphContext(NamedTuple):
    """The parts of a process that its graphs use. `outgoing` orders runs among the calls of the process."""

    process: Process
    connections: Connections
    objects: Objects
    outgoing: Outgoing
    actors: Mapping[ActorId, HostedActor]
    agent_of: Callable[[PeerId], GraphAgent]

    def when_explained(self, route: Route, tell: Callable[[DaftError], object]) -> None:
        async def explain() -> None:
            tell(await self.connections.explanation(cast("Connection", route)))

        self.process.tasks.create_task(explain(), name="explain a lost actor")
