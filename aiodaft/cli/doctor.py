"""`aiodaft doctor`: tries the functions of this machine and of the hosts of a cluster, and prints the results."""

from __future__ import annotations

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

import click

from aiodaft._protocol.node.resources import gpu_names
from aiodaft._runtime.platform.capabilities import missing
from aiodaft._runtime.platform.gpu_claims import machine_gpus
from aiodaft._runtime.platform.interfaces import interfaces
from aiodaft.actor import Actor
from aiodaft.methods import method
from aiodaft.program import run
from aiodaft.runtime import Runtime
from aiodaft_transport import NAMES, TransportError, default_name
from aiodaft_transport.cuda.libcuda import CudaDriver
from aiodaft_transport.system import usable_cpus

from .between_hosts import examine_hosts
from .options import address_argument, key_file_option
from .output import FAILED, Output, json_option

_SIZE: Final = 1 << 20
_PATIENCE: Final = 20.0


@click.command()
@address_argument
@click.argument("nodes", nargs=-1)
@key_file_option
@json_option
def doctor(address: str | None, nodes: tuple[str, ...], key_file: str | None, as_json: bool) -> int:
    """Test this machine and a cluster, and report speeds and faults.

    ADDRESS: the address of a node of a cluster; by default this machine, and the cluster of $AIODAFT_ADDRESS. NODES:
    the nodes to look at; by default all. The exit status is 0 if actors work on this machine, and all of the cluster.
    """
    output = Output(as_json=as_json)
    works = run(_examine(address, key_file, nodes, output))
    output.document["works"] = works
    output.end()
    return 0 if works else FAILED


async def _examine(given: str | None, key_file: str | None, nodes: tuple[str, ...], output: Output) -> bool:
    # The tests of this machine need no cluster.
    address = os.environ.pop("AIODAFT_ADDRESS", None)
    works = given is not None or await _examine_machine(output)
    if address := given or address:
        works &= await examine_hosts(address, key_file, nodes, output)
    return works


async def _examine_machine(output: Output) -> bool:
    found: dict[str, Any] = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{package: _version(package) for package in ("uvloop", "torch", "numpy")},
        "gpus": len(gpu_names(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))),
        "cpus": usable_cpus(),
        "interfaces": interfaces(),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    shown = {
        **found,
        "interfaces": ", ".join(f"{name} {' '.join(ips)}" for name, ips in found["interfaces"].items()),
        "open files": f"{found['open files']:,} per process",
    }
    for what, value in shown.items():
        output.line(f"{what:16} {'not installed' if value is None else value}")
    output.document["machine"] = found
    output.document["missing"] = lacking = missing()
    for what, so in lacking.items():
        output.line(f"{what:16} {click.style('not on this system', 'yellow')}: {so}")
    tried = output.document["transports"] = {}
    for name in NAMES:
        tried[name] = await _try(name, partial(_message, name), output, ", the default" * (name == default_name()))
    working = [name for name in NAMES if tried[name]["works"]]
    tried["cuda"] = await _try("cuda", _cuda_tensor, output, ", for CUDA tensors")
    return bool(working)


async def _try(name: str, trip: Callable[[], Awaitable[float]], output: Output, note: str) -> dict[str, Any]:
    """Whether a transport works, and how many seconds 1 MiB took there and back, or why it does not."""
    try:
        seconds = await trip()
    except (TransportError, _Wrong) as error:
        trouble = str(error)
    except Exception as error:  # noqa: BLE001 - every error is a finding
        trouble = f"{type(error).__name__}: {error}"
    else:
        works = click.style("works", "green")
        output.line(f"{f'transport {name}':16} {works}{note}: 1 MiB there and back in {seconds * 1e3:.1f} ms")
        return {"works": True, "seconds": seconds}
    output.line(f"{f'transport {name}':16} {click.style('does not work', 'red')}: {trouble}")
    return {"works": False, "why": trouble}


class _Echo(Actor):
    @method
    async def same(self, value: Any) -> Any:
        return value


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
    async with asyncio.timeout(_PATIENCE), Runtime(transport=transport, preload=()) as rt, rt.spawn(_Echo) as echo:
        await echo.same(value)
        start = time.perf_counter()
        if not same(await echo.same(value), value):
            raise _Wrong("the value that came back differs from the one that was sent")
        if transport is None and not rt.traffic().device_received:
            raise _Wrong("the value went through host memory")
        return time.perf_counter() - start


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
