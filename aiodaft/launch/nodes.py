"""Nodes on machines that ssh or Ray hands out: commands that get the key by their standard input, and end with it."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import IO, Any, Final, Protocol, Self

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._protocol.coordination.records import check_node_name
from aiodaft._runtime.connections.identity import Identity, load_identity
from aiodaft._runtime.platform.tasks import TaskOwner, see_through, wait_through
from aiodaft.exceptions import LaunchFailed

_READ_SIZE: Final = 64 << 10
_MAX_LINE: Final = 4 << 10
_PATIENCE: Final = 15.0
_LAST_LINES: Final = 5
_LAST_WORDS: Final = 1.0


class StartedNode:
    """A node, from the start of the command that runs it to the end of that command.

    Attributes:
        address: A future: where the node listens. Raises LaunchFailed if the command ended before it said so.
    """

    def __init__(self, name: str, process: Process, tasks: TaskOwner) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.address.add_done_callback(lambda address: address.cancelled() or address.exception())
        self._name = name
        self._process = process
        self._said = b""
        self._relaying = tasks.create_task(self._relay(), name=f"errors of the node {name}")
        self._reading = tasks.create_task(self._read(), name=f"output of the node {name}")

    @classmethod
    async def start(cls, name: str, command: Sequence[str], identity: Identity, tasks: TaskOwner) -> Self:
        """Start the command, and give it the key.

        Raises:
            LaunchFailed: There is no such command.

        Cancellation: raised when the command has ended.
        """
        # The pipe is closed when this process ends, however it does.
        process_made = asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        starting = tasks.start(process_made, name=f"start {name}")
        cancelled = await wait_through(starting)
        try:
            process = starting.result()
        except OSError as error:
            if cancelled is not None:
                raise cancelled from None
            raise LaunchFailed(f"the node {name}: {command[0]} cannot be started: {error.strerror}") from error
        started = cls(name, process, tasks)
        if cancelled is not None:
            started.end()
            await see_through(tasks.start(started.wait_end(), name=f"end {name}"))
            raise cancelled
        assert process.stdin is not None
        # A command that has ended says more by its exit status. uvloop raises an error for a pipe that is closed.
        if not process.stdin.is_closing():
            process.stdin.write(identity.packed())
        return started

    async def _read(self) -> None:
        assert self._process.stdout is not None
        begun = b""
        while data := await self._process.stdout.read(_READ_SIZE):
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                if not self._is_address(line):
                    sys.stdout.write(line.decode(errors="replace") + "\n")
            if len(begun) > _MAX_LINE:
                sys.stdout.write(begun.decode(errors="replace"))
                begun = b""
            sys.stdout.flush()
        status = await self._process.wait()
        if not self.address.done():
            # Another process may have the other end of the pipe.
            await asyncio.wait([self._relaying], timeout=_LAST_WORDS)
            why = f"its command ended with status {status}{self.said}"
            self.address.set_exception(LaunchFailed(f"the node {self._name} did not come up: {why}"))

    async def _relay(self) -> None:
        """Until the node is up, messages of ssh and the node may explain its failure."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_READ_SIZE):
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
            if not self.address.done():
                self._said = (self._said + data)[-_MAX_LINE:]

    @property
    def said(self) -> str:
        lines = self._said.decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def _is_address(self, line: bytes) -> bool:
        if not self.address.done():
            with suppress(ValueError):
                self.address.set_result(str(parse_address(line.decode("ascii", errors="replace"))))
                return True
        return False

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait_end(self) -> None:
        """Wait until it has ended, and all that it printed is shown; if that takes too long, kill its command."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._reading
                await self._relaying
        except TimeoutError:
            # Another process may have the other end of the pipe.
            self._process._transport.close()  # type: ignore[attr-defined]  # the only way to close the pipe
            await self._process.wait()


__all__ = ["StartedNode", "ray", "ssh"]

# No question is asked, and a host that is gone is noticed.
_COMMAND: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@asynccontextmanager
async def ssh(
    hosts: Sequence[str],
    *,
    key_file: str | os.PathLike[str] | None = None,
    python: str | None = None,
    command: Sequence[str] = _COMMAND,
    node_options: Sequence[str] = (),
    patience: float = 60.0,
) -> AsyncGenerator[str]:
    """Run a node on each host for the time of the block; gives the address of the cluster.

    The node of the first host has the coordinator. Each node listens on one free port, of the address that the ssh
    connection came to on the first host, and of the interface to the first host on the others. The nodes end with the
    block, and when this process is killed: each ends with its ssh connection.

    Args:
        hosts: The destinations of `ssh`, "user@" included; the rest names the node, as in `rt.on(node="host1")`.
        key_file: The key of the cluster. Default: $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key. The hosts need no copy:
            the key goes over the ssh connections, and is not written there.
        python: The interpreter on the hosts; it needs aiodaft. Default: the path of the one that runs here.
        command: The command that runs `ssh`, with its options.
        node_options: More options for `aiodaft up` and `aiodaft join`, such as ("--gpus", "8").
        patience: Seconds that all nodes have to come up.

    Raises:
        LaunchFailed: A node did not come up. It has the last lines that ssh and the node said on standard error, where
            all of them are.
        KeyFileError: The key cannot be read.
        ValueError: There are no hosts, or one cannot name a node.

    Cancellation: the nodes end. Leaving the block waits until they have ended, at most 15 s.
    """
    names = [check_node_name(host.rpartition("@")[2]) for host in hosts]
    if isinstance(hosts, str) or not names or len(set(names)) < len(names):
        raise ValueError(f"hosts={hosts!r}: a list of different hosts is needed")
    identity, tasks = load_identity(key_file), TaskOwner("aiodaft.launch.ssh")
    nodes: list[StartedNode] = []

    async def start(host: str, name: str, *arguments: str) -> StartedNode:
        words = [python or sys.executable, "-m", "aiodaft.cli", *arguments, "--key-stdin", "--name", name]
        # Without exec a shell would stay.
        remote = f"exec {shlex.join([*words, *node_options])}"
        # A name that begins with a hyphen is no option.
        started = await StartedNode.start(name, [*command, "--", host, remote], identity, tasks)
        nodes.append(started)
        return started

    try:
        try:
            async with asyncio.timeout(patience):
                address = await (await start(hosts[0], names[0], "up", "--listen", "ssh")).address
                others = [
                    await start(host, name, "join", address) for host, name in zip(hosts[1:], names[1:], strict=True)
                ]
                await asyncio.gather(*(other.address for other in others))
        except TimeoutError:
            late = "".join(node.said for node in nodes if node.address.cancelled() or not node.address.done())
            raise LaunchFailed(f"not all nodes came up within {patience:g} s{late}") from None
        yield address
    finally:
        await see_through(tasks.start(_end_all(nodes), name="end"))


async def _end_all(nodes: Sequence[StartedNode]) -> None:
    # The coordinator is the last one, so that the others can leave.
    for some in (nodes[1:], nodes[:1]):
        for node in some:
            node.end()
        await asyncio.gather(*(node.wait_end() for node in some))


class RayHost:
    """The node of one bundle. It ends with this process, because it reads the end of a pipe then."""

    def __init__(self) -> None:
        self._node: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], key: bytes) -> str:
        """Start a node with these arguments of `aiodaft`. Returns its address.

        Raises:
            RuntimeError: It ended. Its messages are on the standard error of this process, which Ray shows.
        """
        listen = str(Address(import_module("ray").util.get_node_ip_address(), 0))
        command = [sys.executable, "-m", "aiodaft.cli", *arguments, "--listen", listen, "--key-stdin"]
        node = self._node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert node.stdin is not None
        assert node.stdout is not None
        # One that has ended says more by its exit status.
        with suppress(BrokenPipeError):
            node.stdin.write(key)
            node.stdin.flush()
        line = node.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError(f"the node did not come up: it ended with status {node.wait(_PATIENCE)}")
        threading.Thread(target=_show, args=(node.stdout,), daemon=True).start()
        return str(parse_address(line))

    def end(self) -> None:
        if self._node is not None and self._node.stdin is not None:
            with suppress(BrokenPipeError):
                self._node.stdin.close()
            try:
                self._node.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._node.kill()


def _show(printed: IO[bytes]) -> None:
    """Pass on the output of actors; Ray shows it where the program runs."""
    for line in printed:
        print(line.decode(errors="replace"), end="", flush=True)


_TASK_PATIENCE: Final = 20.0


class PlacementGroup(Protocol):
    @property
    def bundle_specs(self) -> list[dict[str, Any]]: ...
    def ready(self) -> Any: ...


@asynccontextmanager
async def ray(
    bundles: Sequence[Mapping[str, float]] | PlacementGroup,
    *,
    strategy: str = "SPREAD",
    key_file: str | os.PathLike[str] | None = None,
    node_options: Sequence[str] = (),
    patience: float = 60.0,
) -> AsyncGenerator[str]:
    """Run a node in each bundle of a placement group for the time of the block; gives the address of the cluster.

    The nodes are "ray-0", "ray-1" and so on, as in `rt.on(node="ray-0")`. Each offers the CPUs and GPUs of its bundle
    and listens on one free port, of the address that Ray knows its machine by. The nodes end with the block, and
    when this process is killed.

    Args:
        bundles: The resources of each node, as in `[{"CPU": 8, "GPU": 1}] * 4`, or a placement group of yours.
        strategy: The way in which Ray spreads the bundles: "SPREAD", "STRICT_SPREAD", "PACK" or "STRICT_PACK".
        key_file: The key of the cluster. Default: $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key. The machines need no
            copy: Ray carries the key to them.
        node_options: More options for `aiodaft up` and `aiodaft join`, such as ("--label", "pool=a").
        patience: Seconds until Ray has room for all bundles, and all nodes have come up.

    Raises:
        LaunchFailed: Ray has no room, or a node did not come up.
        KeyFileError: The key cannot be read.
        ImportError: Ray is not installed.
        ValueError: A bundle has no whole number of GPUs.

    Cancellation: the nodes end. Leaving the block waits until they have ended, at most 40 s.
    """
    api = import_module("ray")
    key, tasks = load_identity(key_file).packed(), TaskOwner("aiodaft.launch.ray")
    if made := isinstance(bundles, Sequence):
        specs = [_checked(spec) for spec in bundles]
        group = api.util.placement_group([dict(spec) for spec in specs], strategy)
    else:
        specs = [_checked(spec) for spec in bundles.bundle_specs]
        group = bundles
    nodes: list[Any] = []
    try:
        try:
            async with asyncio.timeout(patience):
                await group.ready()
                nodes += [_node_in(group, number, spec) for number, spec in enumerate(specs)]
                options = [_options(number, spec, node_options) for number, spec in enumerate(specs)]
                address = await nodes[0].start.remote(["up", *options[0]], key)
                joining = zip(nodes[1:], options[1:], strict=True)
                await asyncio.gather(*(node.start.remote(["join", address, *words], key) for node, words in joining))
        except TimeoutError:
            raise LaunchFailed(f"not all bundles had room, and nodes that came up, within {patience:g} s") from None
        except api.exceptions.RayError as error:
            raise LaunchFailed(f"a node of Ray did not come up: {error}") from error
        yield address
    finally:
        await see_through(tasks.start(_end_hosts(nodes, api.kill), name="end"))
        if made:
            api.util.remove_placement_group(group)


def _checked(spec: Mapping[str, float]) -> Mapping[str, float]:
    if spec.get("GPU", 0) % 1:
        raise ValueError(f"bundle {dict(spec)}: a node has whole GPUs")
    return spec


def _options(number: int, spec: Mapping[str, float], more: Sequence[str]) -> list[str]:
    return ["--name", f"ray-{number}", "--cpus", str(spec.get("CPU", 0)), "--gpus", str(int(spec.get("GPU", 0))), *more]


def _node_in(group: PlacementGroup, number: int, spec: Mapping[str, float]) -> Any:
    """The actor of Ray that takes a bundle: all of it, so that Ray gives it to nothing else."""
    others = {name: amount for name, amount in spec.items() if name not in {"CPU", "GPU", "memory"}}
    strategies = import_module("ray.util.scheduling_strategies")
    strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return (
        import_module("ray")
        .remote(RayHost)
        .options(
            num_cpus=spec.get("CPU", 0),
            num_gpus=spec.get("GPU", 0),
            memory=spec.get("memory"),
            resources=others or None,
            scheduling_strategy=strategy,
            max_concurrency=2,
        )
        .remote()
    )


async def _end_hosts(nodes: Sequence[Any], kill: Callable[[Any], object]) -> None:
    # The coordinator is the last one, so that the others can leave.
    for some in (nodes[1:], nodes[:1]):
        ending = asyncio.gather(*(node.end.remote() for node in some), return_exceptions=True)
        try:
            async with asyncio.timeout(_TASK_PATIENCE):
                await ending
        except TimeoutError:
            continue
        finally:
            for node in some:
                kill(node)
