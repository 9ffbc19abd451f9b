"""Distributed actors, futures and tasks for asyncio: one plain async program drives many processes and GPUs.

The first use of a name loads its module, so a process loads only the modules it uses. Type checkers read __init__.pyi.
"""

from importlib import import_module
from typing import Any

from aiodaft._protocol.connections.versions import __version__ as __version__

_NAMES = {
    "aiodaft.actor": "Actor",
    "aiodaft.channel": "Channel",
    "aiodaft.collectives": "all_gather all_reduce all_to_all broadcast gather reduce reduce_scatter scatter",
    "aiodaft.deadlines": "deadline",
    "aiodaft.exceptions": (
        "ActorDied CallCancelled ChannelClosed DaftError DeadlineExceeded DeadlockDetected GroupChanged NameNotFound "
        "Overloaded RemoteError ResourceExhausted SpawnFailed"
    ),
    "aiodaft.graph": "Graph compile",
    "aiodaft.group": "Group",
    "aiodaft.member": "create_task current_actor current_group",
    "aiodaft.methods": "method",
    "aiodaft.program": "run start stop",
    "aiodaft.reading": "borrow",
    "aiodaft.ref": "Ref Refs Stream",
    "aiodaft.runtime": "Runtime current_runtime",
    "aiodaft.scope": "Scope",
    "aiodaft.supervision": "Backoff Patience Restart",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Modules with the other names, which `import aiodaft` is enough for.
_MODULES = (
    "checkpoint",
    "collectives",
    "dashboard",
    "exceptions",
    "launch",
    "logs",
    "memory",
    "pipeline",
    "policies",
    "pool",
    "prometheus",
    "queue",
    "resharding",
    "serve",
    "state",
    "supervision",
    "telemetry",
    "tensor",
    "testing",
    "topics",
    "typing",
    "web",
)

__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll] - it reads the stub


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
    if name in _MODULES:
        return import_module(f"aiodaft.{name}")
    home = _HOMES.get(name)
    if home is None:
        instead = f": use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}", name=name)
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
