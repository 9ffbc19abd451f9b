"""A worker that is a new interpreter, started by exec."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from aiodaft._runtime.node.orders import Spawn
from aiodaft._runtime.platform.linux import fresh_python

# In place of a descriptor: the kernel ends the worker with its parent.
BY_KERNEL: Final = -1


def start_fresh(
    order: Spawn, environment: Mapping[str, str], fds: Sequence[int], lifeline: int = BY_KERNEL
) -> subprocess.Popen[bytes]:
    """Start a worker, in a session of its own; the caller closes its descriptors here.

    Args:
        order: The worker to start.
        environment: That of all workers; the order may add to it.
        fds: Those of its connection, its output, its errors and its heartbeat.
        lifeline: The pipe that it reads, and with which it ends: the pipe ends with the process that starts it.

    Raises:
        OSError: The machine refuses it.
    """
    import tempfile  # noqa: PLC0415 - takes long to import, and few workers are started so

    connection, out, err, heartbeat = fds
    kept = [fd for fd in (connection, heartbeat, lifeline) if fd >= 0]
    # A pipe has no room for any settings, and nothing reads it yet.
    with tempfile.TemporaryFile(prefix="aiodaft-") as settings:
        settings.write(order.settings)
        settings.seek(0)
        numbers = connection, settings.fileno(), heartbeat, lifeline
        return subprocess.Popen(
            fresh_python("aiodaft._runtime.node.worker_main", *numbers, front=order.code, path=order.path),
            env={**environment, **order.environment},
            cwd=order.directory,
            pass_fds=(*kept, settings.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
