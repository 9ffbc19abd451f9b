"""Distributed actors, futures and tasks for asyncio: one plain async program drives many processes and GPUs.

The first use of a name loads its module, so a process loads only modules that it uses. Type checkers read __init__.pyi.
"""

from importlib import import_module
from typing import Any

from aiodaft._protocol.connections.versions import __version__ as __version__

_NAMES = {
    "aiodaft._protocol.diagnostics.trace_context": "TraceContext",
    "aiodaft._protocol.node.liveness": "Patience",
    "aiodaft._protocol.supervision.supervision": "Backoff Restart",
    "aiodaft._runtime.connections.traffic": "Traffic",
    "aiodaft._runtime.logs.json_lines": "JsonFormatter",
    "aiodaft.actor": "Actor local",
    "aiodaft.attempt": "current_attempt",
    "aiodaft.channel": "Channel",
    "aiodaft.collectives": "all_gather all_reduce all_to_all broadcast gather reduce reduce_scatter scatter",
    "aiodaft.deadlines": "deadline",
    "aiodaft.exceptions": (
        "ActorDied BorrowError CallCancelled ChannelClosed CoordinatorUnavailable CorruptState "
        "CyclicGraph DaftError DeadlineExceeded DeadlockDetected GroupChanged InsufficientResources "
        "KeyFileError LaunchFailed LeaseLost NameNotFound NameTaken NotAuthenticated Overloaded "
        "OwnerDied PeerLost RemoteError ResourceExhausted RestartLimitReached RuntimeClosed "
        "SerializationError SpawnFailed StaleHandle VersionMismatch"
    ),
    "aiodaft.graph": "Graph StepTime compile",
    "aiodaft.group": "Group",
    "aiodaft.info": "ActorInfo NodeInfo",
    "aiodaft.inside": "current_runtime",
    "aiodaft.logs": "Logs",
    "aiodaft.member": "CurrentGroup Message current_group",
    "aiodaft.memory": "Registration empty register",
    "aiodaft.methods": "method",
    "aiodaft.overview": "Overview",
    "aiodaft.placement": "Mesh Placement Slice Spawned",
    "aiodaft.program": "run start stop",
    "aiodaft.reading": "read_only",
    "aiodaft.ref": "Ref Refs Stream borrow lazy",
    "aiodaft.resharding": "Layout ReshardPlan Sharding reshard",
    "aiodaft.runtime": "Runtime",
    "aiodaft.scope": "Scope",
    "aiodaft.service": "Service ServiceGroup",
    "aiodaft.survivors": "Survivors among_survivors",
    "aiodaft.this_actor": "create_task current_actor",
    "aiodaft.trace_contexts": "current_trace_context trace_context",
    "aiodaft.web": "cancel_on_disconnect",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES |= {name: f"aiodaft.{name}" for name in ("exceptions", "policies", "web")}

__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll] - it reads the stub


# The words of other frameworks.
_INSTEAD = {
    "get": "`await ref`, or in a thread `ref.result()`",
    "init": "`async with aiodaft.Runtime() as rt:`, or in a notebook `rt = await aiodaft.start()`",
    "put": "`rt.put(value)`",
    "remote": "`class W(aiodaft.Actor)` with `@aiodaft.method`, and `await rt.spawn(W)`",
    "shutdown": "the end of `async with aiodaft.Runtime() as rt:`, or in a notebook `await aiodaft.stop()`",
    "spawn": "`await rt.spawn(W)`",
    "wait": "`await asyncio.wait(refs)`, or `await ref` for the value",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        instead = f": use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}", name=name)
    loaded = import_module(module)
    value = globals()[name] = loaded if module == f"aiodaft.{name}" else getattr(loaded, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
