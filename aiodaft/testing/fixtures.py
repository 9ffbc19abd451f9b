"""The runtimes of the pytest plugin, which loads this with the first test that uses one; see `aiodaft_pytest`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.connections.identity import Identity, load_identity
from aiodaft._runtime.diagnostics.await_chains import frames_of, users_line
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.platform.linux import process_tree
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import LaunchFailed
from aiodaft.launch.nodes import StartedNode
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime
from aiodaft.testing.in_process import in_process

_DESCRIPTORS: Final = "/proc/self/fd"
_SEGMENT: Final = "/memfd:aiodaft"
_ROUNDS: Final = 2


class Before:
    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._processes = set(process_tree(os.getpid()))
        self._segments = _segments()

    def left(self) -> list[str]:
        """The objects that have come since and have not ended: a line for each."""
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        found = [_task(task) for task in sorted(tasks, key=asyncio.Task.get_name) if not _runs_tests(task)]
        found += [f"the process {_command(pid)} runs" for pid in set(process_tree(os.getpid())) - self._processes]
        more = len(_segments()) - len(self._segments)
        if more > 0:
            found.append(f"{more} segments of shared memory are open")
        return found


def held_refs(runtime: Runtime, fixtures: Collection[object]) -> list[str]:
    """Without those that are values of fixtures: a line for each ref."""
    found = _refs(runtime, fixtures)
    # An error that was raised refers to frames, these to refs, and the state of a ref to its error: only the collector
    # frees such a circle, and the first time it reports the ref as dropped.
    for _ in range(_ROUNDS) if found else ():
        found.clear()
        gc.collect()
        runtime._opened.objects.drop_now()
        found = _refs(runtime, fixtures)
    return sorted(f"the ref of {state_of(ref).label} is held" for ref in found)


def _refs(runtime: Runtime, fixtures: Collection[object]) -> list[Ref[Any]]:
    process, kept = runtime._opened.process, {id(value) for value in fixtures}
    refs = [found for found in gc.get_objects() if type(found) is Ref and id(found) not in kept]
    return [ref for ref in refs if state_of(ref).process is process and _is_users(state_of(ref))]


def _is_users(state: RefState) -> bool:
    return not isinstance(state, CallState) or state.target.actor >= FIRST_USER_ACTOR


def _runs_tests(task: asyncio.Task[Any]) -> bool:
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")


def _task(task: asyncio.Task[Any]) -> str:
    line = users_line(frames_of(task.get_coro()))
    return f"the task {task.get_name()!r} runs" + (f", at {line}" if line else f": {task.get_coro()!r}")


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
        return f"{pid} ({file.read().replace(chr(0), ' ').strip():.100})"
    return str(pid)


def _segments() -> list[str]:
    found: list[str] = []
    for entry in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{entry}")
            if target.startswith(_SEGMENT):
                found.append(target)
    return found


@dataclass(frozen=True)
class LocalCluster:
    """Some nodes, n1 and so on, the first with the coordinator.

    Attributes:
        address: The address of the first node.
        key_file: The key of the cluster.
        pids: The process of each node.
    """

    address: str
    key_file: Path
    pids: dict[str, int]


@asynccontextmanager
async def local_cluster(count: int, options: Sequence[str]) -> AsyncGenerator[LocalCluster]:
    """Start nodes with these options of `aiodaft up`; they end with the block, and with this process.

    Raises:
        LaunchFailed: One did not come up, or no key can be made.
    """
    with tempfile.TemporaryDirectory(prefix="aiodaft-cluster-") as folder:
        key_file = Path(folder, "key")
        await _make_key(key_file)
        nodes = _Nodes(load_identity(key_file), options)
        try:
            address = await nodes.start("n1", "up")
            async with asyncio.TaskGroup() as group:
                for number in range(2, count + 1):
                    group.create_task(nodes.start(f"n{number}", "join", address))
            yield LocalCluster(address, key_file, {name: node._process.pid for name, node in nodes.started.items()})
        finally:
            await nodes.aclose()


class _Nodes:
    def __init__(self, identity: Identity, options: Sequence[str]) -> None:
        self._identity, self._options = identity, options
        self._tasks = TaskOwner("nodes of a test")
        self.started: dict[str, StartedNode] = {}

    async def start(self, name: str, *command: str) -> str:
        words = [*command, "--name", name, "--listen", "tcp://127.0.0.1:0", "--key-stdin", *self._options]
        command_line = [sys.executable, "-m", "aiodaft.cli", *words]
        node = self.started[name] = await StartedNode.start(name, command_line, self._identity, self._tasks)
        return await node.address

    async def aclose(self) -> None:
        # The first one last: the others leave in order.
        for node in reversed(self.started.values()):
            node.end()
        for node in reversed(self.started.values()):
            await node.wait_end()
        await self._tasks.aclose()


async def _make_key(path: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    making = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiodaft.cli", "key", "new", str(path), stdout=pipe, stderr=pipe
    )
    _, problem = await making.communicate()
    if making.returncode:
        raise LaunchFailed(f"no key for the cluster: {problem.decode(errors='replace').strip()}")


FAILED: Final = pytest.StashKey[bool]()
CLUSTER: Final = pytest.StashKey[LocalCluster]()


@asynccontextmanager
async def opened(kind: str, item: pytest.Item) -> AsyncGenerator[Runtime]:
    """The runtime of a fixture; its end fails a test that has passed and has left something."""
    options = _options(item)
    nodes, leaks = options.pop("nodes", None), options.pop("leaks", True)
    before = Before()
    refs: list[str] = []
    async with AsyncExitStack() as stack:
        if kind == "daft":
            if nodes is not None:
                raise pytest.UsageError(f"{item.nodeid}: only `daft_cluster` has nodes, `daft` has no processes")
            runtime = in_process(**options)
        elif nodes is None:
            runtime = Runtime(**{"cpus": 64, "gpus": 0, "preload": (), **options})
        else:
            runtime = await _attached(stack, nodes, options, item)
        async with runtime:
            yield runtime  # noqa: RUF075 - pytest raises no error here
            if leaks and not item.stash.get(FAILED, False):
                refs = held_refs(runtime, getattr(item, "funcargs", {}).values())
    if leaks and not item.stash.get(FAILED, False) and (left := refs + before.left()):
        pytest.fail(f"{item.nodeid} leaks:\n" + "\n".join(f"- {line}" for line in left), pytrace=False)


async def _attached(stack: AsyncExitStack, nodes: int, options: dict[str, Any], item: pytest.Item) -> Runtime:
    offers = [f"--cpus={options.pop('cpus', 64)}", f"--gpus={options.pop('gpus', 0)}"]
    cluster = await stack.enter_async_context(local_cluster(nodes, offers))
    item.stash[CLUSTER] = cluster
    return Runtime(**{**options, "address": cluster.address, "key_file": cluster.key_file})


def _options(item: pytest.Item) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for marker in item.iter_markers("daft"):
        if marker.args:
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.daft takes options by name, such as gpus=2")
        found = {**marker.kwargs, **found}
    return found


def pids_of_nodes(item: pytest.Item) -> Mapping[str, int]:
    cluster = item.stash.get(CLUSTER, None)
    return {} if cluster is None else cluster.pids
