"""`aiodaft doctor`: tries what this machine and the hosts of a cluster can do, and prints what works and why not."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import operator
import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiodaft._protocol.node.resources import gpu_names
from aiodaft._runtime.platform.gpu_claims import machine_gpus
from aiodaft._runtime.platform.interfaces import interfaces
from aiodaft.bench.actors import Echo
from aiodaft.runtime import Runtime
from aiodaft_transport import NAMES, TransportError, default_name
from aiodaft_transport.cuda.libcuda import CudaDriver

from .between_hosts import examine_hosts
from .cluster import add_address as add_cluster

_SIZE: Final = 1 << 20
_PATIENCE: Final = 20.0


def add_address(parser: argparse.ArgumentParser) -> None:
    """The arguments of `aiodaft doctor`."""
    add_cluster(parser)
    parser.add_argument("nodes", nargs="*", help="the nodes to look at; default: all of the cluster")


async def examine(arguments: argparse.Namespace) -> int:
    """Print the findings on this machine or on a cluster, or both if only the environment names one.

    Returns the exit status: 0 if actors work on this machine, and all of the cluster.
    """
    # What is tried on this machine needs no cluster.
    address = os.environ.pop("AIODAFT_ADDRESS", None)
    works = arguments.address is not None or await _examine_machine()
    if address := arguments.address or address:
        works &= await examine_hosts(address, arguments.key_file, arguments.nodes)
    return 0 if works else 1


async def _examine_machine() -> bool:
    _say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("uvloop", "torch", "numpy"):
        _say(package, _version(package) or "not installed")
    _say("gpus", str(len(gpu_names(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")))))
    _say("cpus", str(len(os.sched_getaffinity(0))))
    shown = [f"{name} {' '.join(ips)}" for name, ips in interfaces().items()]
    _say("interfaces", ", ".join(shown))
    _say("open files", f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} per process")
    working = 0
    for name in NAMES:
        working += await _try(name, partial(_message, name), ", the default" if name == default_name() else "")
    await _try("cuda", _cuda_tensor, ", for CUDA tensors")
    return working > 0


async def _try(name: str, trip: Callable[[], Awaitable[float]], note: str) -> bool:
    """Print whether a transport works, and how long something took there and back, or why it does not."""
    try:
        seconds = await trip()
    except (TransportError, _Wrong) as error:
        trouble = str(error)
    except Exception as error:  # noqa: BLE001 - every error is a finding
        trouble = f"{type(error).__name__}: {error}"
    else:
        _say(f"transport {name}", f"works{note}: 1 MiB there and back in {seconds * 1e3:.1f} ms")
        return True
    _say(f"transport {name}", f"does not work: {trouble}")
    return False


class _Wrong(Exception):
    """A value came back changed, or by another route."""


async def _message(transport: str) -> float:
    return await _round_trip(bytes(_SIZE), operator.eq, transport)


async def _cuda_tensor() -> float:
    CudaDriver().close()
    import torch  # noqa: PLC0415 - optional package

    return await _round_trip(torch.arange(_SIZE, dtype=torch.uint8, device="cuda"), torch.equal, None)


async def _round_trip(value: Any, same: Callable[[Any, Any], bool], transport: str | None) -> float:
    """Seconds that a value takes to an actor and back; without a transport, from GPU to GPU."""
    async with asyncio.timeout(_PATIENCE), Runtime(transport=transport, preload=()) as rt, rt.spawn(Echo) as echo:
        await echo.on_loop(value)
        start = time.perf_counter()
        if not same(await echo.on_loop(value), value):
            raise _Wrong("what came back is not what was sent")
        if transport is None and not rt.traffic().device_received:
            raise _Wrong("the value went through host memory")
        return time.perf_counter() - start


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _say(what: str, found: str) -> None:
    print(f"{what:16} {found}", flush=True)
