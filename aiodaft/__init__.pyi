"""Distributed actors, futures and tasks for asyncio: one plain async program drives many processes and GPUs."""

from aiodaft import exceptions, policies, web
from aiodaft._protocol.connections.versions import __version__
from aiodaft._protocol.diagnostics.trace_context import TraceContext
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.supervision.supervision import Backoff, Restart
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft._runtime.logs.json_lines import JsonFormatter
from aiodaft.actor import Actor, local
from aiodaft.attempt import current_attempt
from aiodaft.channel import Channel
from aiodaft.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from aiodaft.deadlines import deadline
from aiodaft.exceptions import (
    ActorDied,
    BorrowError,
    CallCancelled,
    ChannelClosed,
    CoordinatorUnavailable,
    CorruptState,
    CyclicGraph,
    DaftError,
    DeadlineExceeded,
    DeadlockDetected,
    GroupChanged,
    InsufficientResources,
    KeyFileError,
    LaunchFailed,
    LeaseLost,
    NameNotFound,
    NameTaken,
    NotAuthenticated,
    Overloaded,
    OwnerDied,
    PeerLost,
    RemoteError,
    ResourceExhausted,
    RestartLimitReached,
    RuntimeClosed,
    SerializationError,
    SpawnFailed,
    StaleHandle,
    VersionMismatch,
)
from aiodaft.graph import Graph, StepTime, compile
from aiodaft.group import Group
from aiodaft.info import ActorInfo, NodeInfo
from aiodaft.inside import current_runtime
from aiodaft.logs import Logs
from aiodaft.member import CurrentGroup, Message, current_group
from aiodaft.memory import Registration, empty, register
from aiodaft.methods import method
from aiodaft.overview import Overview
from aiodaft.placement import Mesh, Placement, Slice, Spawned
from aiodaft.program import run, start, stop
from aiodaft.reading import read_only
from aiodaft.ref import Ref, Refs, Stream, borrow, lazy
from aiodaft.resharding import Layout, ReshardPlan, Sharding, reshard
from aiodaft.runtime import Runtime
from aiodaft.scope import Scope
from aiodaft.service import Service, ServiceGroup
from aiodaft.survivors import Survivors, among_survivors
from aiodaft.this_actor import create_task, current_actor
from aiodaft.trace_contexts import current_trace_context, trace_context
from aiodaft.web import cancel_on_disconnect

__all__ = [
    "Actor",
    "ActorDied",
    "ActorInfo",
    "Backoff",
    "BorrowError",
    "CallCancelled",
    "Channel",
    "ChannelClosed",
    "CoordinatorUnavailable",
    "CorruptState",
    "CurrentGroup",
    "CyclicGraph",
    "DaftError",
    "DeadlineExceeded",
    "DeadlockDetected",
    "Graph",
    "Group",
    "GroupChanged",
    "InsufficientResources",
    "JsonFormatter",
    "KeyFileError",
    "LaunchFailed",
    "Layout",
    "LeaseLost",
    "Logs",
    "Mesh",
    "Message",
    "NameNotFound",
    "NameTaken",
    "NodeInfo",
    "NotAuthenticated",
    "Overloaded",
    "Overview",
    "OwnerDied",
    "Patience",
    "PeerLost",
    "Placement",
    "Ref",
    "Refs",
    "Registration",
    "RemoteError",
    "ReshardPlan",
    "ResourceExhausted",
    "Restart",
    "RestartLimitReached",
    "Runtime",
    "RuntimeClosed",
    "Scope",
    "SerializationError",
    "Service",
    "ServiceGroup",
    "Sharding",
    "Slice",
    "SpawnFailed",
    "Spawned",
    "StaleHandle",
    "StepTime",
    "Stream",
    "Survivors",
    "TraceContext",
    "Traffic",
    "VersionMismatch",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "among_survivors",
    "borrow",
    "broadcast",
    "cancel_on_disconnect",
    "compile",
    "create_task",
    "current_actor",
    "current_attempt",
    "current_group",
    "current_runtime",
    "current_trace_context",
    "deadline",
    "empty",
    "exceptions",
    "gather",
    "lazy",
    "local",
    "method",
    "policies",
    "read_only",
    "reduce",
    "reduce_scatter",
    "register",
    "reshard",
    "run",
    "scatter",
    "start",
    "stop",
    "trace_context",
    "web",
]
