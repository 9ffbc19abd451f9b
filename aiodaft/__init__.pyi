"""Distributed actors, futures and tasks for asyncio: one plain async program drives many processes and GPUs."""

from aiodaft import (
    checkpoint as checkpoint,
)
from aiodaft import (
    collectives as collectives,
)
from aiodaft import (
    dashboard as dashboard,
)
from aiodaft import (
    exceptions as exceptions,
)
from aiodaft import (
    launch as launch,
)
from aiodaft import (
    logs as logs,
)
from aiodaft import (
    memory as memory,
)
from aiodaft import (
    pipeline as pipeline,
)
from aiodaft import (
    policies as policies,
)
from aiodaft import (
    pool as pool,
)
from aiodaft import (
    prometheus as prometheus,
)
from aiodaft import (
    queue as queue,
)
from aiodaft import (
    resharding as resharding,
)
from aiodaft import (
    serve as serve,
)
from aiodaft import (
    state as state,
)
from aiodaft import (
    supervision as supervision,
)
from aiodaft import (
    telemetry as telemetry,
)
from aiodaft import (
    tensor as tensor,
)
from aiodaft import (
    testing as testing,
)
from aiodaft import (
    topics as topics,
)
from aiodaft import (
    typing as typing,
)
from aiodaft import (
    web as web,
)
from aiodaft._protocol.connections.versions import __version__
from aiodaft.actor import Actor
from aiodaft.channel import Channel
from aiodaft.collectives import all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter
from aiodaft.deadlines import deadline
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    ChannelClosed,
    DaftError,
    DeadlineExceeded,
    DeadlockDetected,
    GroupChanged,
    NameNotFound,
    Overloaded,
    RemoteError,
    ResourceExhausted,
    SpawnFailed,
)
from aiodaft.graph import Graph, compile
from aiodaft.group import Group
from aiodaft.member import create_task, current_actor, current_group
from aiodaft.methods import method
from aiodaft.program import run, start, stop
from aiodaft.reading import borrow
from aiodaft.ref import Ref, Refs, Stream
from aiodaft.runtime import Runtime, current_runtime
from aiodaft.scope import Scope
from aiodaft.supervision import Backoff, Patience, Restart

__all__ = [
    "Actor",
    "ActorDied",
    "Backoff",
    "CallCancelled",
    "Channel",
    "ChannelClosed",
    "DaftError",
    "DeadlineExceeded",
    "DeadlockDetected",
    "Graph",
    "Group",
    "GroupChanged",
    "NameNotFound",
    "Overloaded",
    "Patience",
    "Ref",
    "Refs",
    "RemoteError",
    "ResourceExhausted",
    "Restart",
    "Runtime",
    "Scope",
    "SpawnFailed",
    "Stream",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "borrow",
    "broadcast",
    "compile",
    "create_task",
    "current_actor",
    "current_group",
    "current_runtime",
    "deadline",
    "gather",
    "method",
    "reduce",
    "reduce_scatter",
    "run",
    "scatter",
    "start",
    "stop",
]
