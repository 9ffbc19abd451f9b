"""Switches OpenTelemetry on in a process; where it is off, no code of it is loaded, and none runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Final

from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.graphs.registry import Graphs
from aiodaft._runtime.process import MSGPACK

# Sets up a tracer provider in a process: a function, or where it is, such as "package.module:function".
Setup = Callable[[], object] | str

# In front of a name; a pickle begins otherwise.
_NAMED: Final = b":"


def packed_setup(setup: Setup | None, codec: str) -> bytes:
    """A setup as bytes, for other processes; none for None.

    Raises:
        TypeError: It is no function and no name.
        ValueError: It is a function, and processes do not unpickle.
    """
    if setup is None:
        return b""
    if isinstance(setup, str):
        module, _, name = setup.partition(":")
        if not (module and name):
            raise ValueError(f'telemetry={setup!r}: "package.module:function" is needed')
        return _NAMED + setup.encode()
    if not callable(setup):
        raise TypeError(f"telemetry={setup!r:.80}: a function that sets up OpenTelemetry is needed, or where it is")
    if codec == MSGPACK:
        raise ValueError('with codec="msgpack" no code is sent: telemetry is "package.module:function" then')
    import cloudpickle  # noqa: PLC0415 - slow to load

    return bytes(cloudpickle.dumps(setup))


def set_up_telemetry(packed: bytes) -> None:
    """Set up OpenTelemetry in this process, unless it has a tracer provider.

    Raises:
        ImportError: OpenTelemetry is not installed here.
        Exception: An error of the setup.
    """
    try:
        from aiodaft._runtime.diagnostics.spans import has_provider  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("telemetry needs OpenTelemetry: pip install 'aiodaft[otel]'") from error
    if not has_provider():
        _unpacked(packed)()


def begin_telemetry(caller: Caller, host: Host, inbound: Inbound, graphs: Graphs) -> None:
    from aiodaft._runtime.diagnostics.spans import Spans  # noqa: PLC0415 - optional

    Spans(caller, host, inbound, graphs).begin()


def _unpacked(packed: bytes) -> Callable[[], object]:
    found: Callable[[], object]
    if packed.startswith(_NAMED):
        module, _, name = packed.removeprefix(_NAMED).decode().partition(":")
        found = attrgetter(name)(import_module(module))
    else:
        found = pickle.loads(packed)
    return found


def end_telemetry() -> None:
    try:
        from aiodaft._runtime.diagnostics.spans import shut_down  # noqa: PLC0415 - optional
    except ImportError:
        # Without OpenTelemetry there are none.
        return
    shut_down()
