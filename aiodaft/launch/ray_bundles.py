"""Nodes in the bundles of a Ray placement group."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import IO, Any, Final, Protocol

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._runtime.connections.identity import load_identity
from aiodaft._runtime.platform.tasks import TaskOwner, see_through
from aiodaft.exceptions import LaunchFailed

# Seconds that a node has to end.
_START_PATIENCE: Final = 15.0


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
            raise RuntimeError(f"the node did not come up: it ended with status {node.wait(_START_PATIENCE)}")
        threading.Thread(target=_show, args=(node.stdout,), daemon=True).start()
        return str(parse_address(line))

    def end(self) -> None:
        if self._node is not None and self._node.stdin is not None:
            with suppress(BrokenPipeError):
                self._node.stdin.close()
            try:
                self._node.wait(_START_PATIENCE)
            except subprocess.TimeoutExpired:
                self._node.kill()


def _show(printed: IO[bytes]) -> None:
    """Pass on the output of actors; Ray shows it where the program runs."""
    for line in printed:
        print(line.decode(errors="replace"), end="", flush=True)


__all__ = ["ray"]

# Seconds that Ray has to end a node.
_PATIENCE: Final = 20.0


class PlacementGroup(Protocol):
    """That of Ray."""

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
        await see_through(tasks.start(_end(nodes, api.kill), name="end"))
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
            # `end`, while `start` waits.
            max_concurrency=2,
        )
        .remote()
    )


async def _end(nodes: Sequence[Any], kill: Callable[[Any], object]) -> None:
    # The first one has the coordinator: it is the last one, so that the others can leave.
    for some in (nodes[1:], nodes[:1]):
        ending = asyncio.gather(*(node.end.remote() for node in some), return_exceptions=True)
        try:
            async with asyncio.timeout(_PATIENCE):
                await ending
        except TimeoutError:
            # Ray ends the other actors.
            continue
        finally:
            for node in some:
                kill(node)
