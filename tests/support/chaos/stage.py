"""The place of a chaos run: this machine, or several hosts, which are network namespaces."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any, Final, Protocol

from host_clusters import HostCluster

from aiodaft.placement import Spawner
from aiodaft.runtime import Runtime

__all__ = ["Hosts", "Machine", "Stage"]

# Bytes of the disk with the log files.
_DISK: Final = 1 << 20


class Stage(Protocol):
    """Runtimes, places for actors, and a fault of the surroundings of these."""

    def runtime(self, transport: str) -> AbstractAsyncContextManager[Runtime]:
        """An open runtime. It has the transport, if the stage leaves a choice."""
        ...

    def spawner(self, runtime: Runtime, index: int | None, **options: Any) -> Spawner:
        """Spawns actor `index`, or for None a group, in its place, with options of `Runtime.on`."""
        ...

    async def trouble(self, seconds: float) -> None:
        """Make the fault, for so long if it lasts."""
        ...


class Machine:
    """This machine: the disk with the log files of all actors is full for a moment, where `small_disk` has mounted it.

    Args:
        logs: The folder for log files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    @classmethod
    @contextmanager
    def with_small_disk(cls, folder: Path) -> Generator[Machine]:
        """A machine with a disk of its own for its log files, where this user may mount one."""
        folder.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "aiodaft-chaos", str(folder)]
        mounted = os.geteuid() == 0 and not subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode
        try:
            yield cls(folder)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)

    def runtime(self, transport: str) -> AbstractAsyncContextManager[Runtime]:
        return Runtime(preload=(), stop_grace=2, unhandled="log", transport=transport, logs=self._logs)

    def spawner(self, runtime: Runtime, index: int | None, **options: Any) -> Spawner:
        return runtime.on(**options)

    async def trouble(self, seconds: float) -> None:
        if self._logs.is_mount():
            with tempfile.TemporaryFile(dir=self._logs, buffering=0) as rest:
                with suppress(OSError):
                    while rest.write(bytes(_DISK)):
                        pass
                await asyncio.sleep(seconds)


class Hosts:
    """The hosts of a cluster: all their connections to each other are reset.

    The controller is on the last one; actors are on one after the other.
    """

    def __init__(self, cluster: HostCluster) -> None:
        self._cluster = cluster

    @asynccontextmanager
    async def runtime(self, transport: str) -> AsyncGenerator[Runtime]:
        last = self._cluster.net.hosts[-1]
        with self._cluster.controllers_on(last):
            async with self._cluster.runtime(last, stop_grace=2, unhandled="log") as opened:
                yield opened

    def spawner(self, runtime: Runtime, index: int | None, **options: Any) -> Spawner:
        if index is None:
            return runtime.on(spread=True, **options)
        hosts = self._cluster.net.hosts
        return runtime.on(node=hosts[index % len(hosts)].name, **options)

    async def trouble(self, seconds: float) -> None:
        for one, other in combinations(self._cluster.net.hosts, 2):
            await asyncio.to_thread(one.reset_connections, other)
