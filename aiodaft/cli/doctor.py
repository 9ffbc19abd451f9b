"""`aiodaft doctor`: tries each feature on this machine, and prints which work and why others do not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import resource
import time
from typing import Final

from aiodaft._runtime.platform.gpu_claims import gpu_names, machine_gpus
from aiodaft.bench.actors import Echo
from aiodaft.runtime import Runtime
from aiodaft_transport import NAMES, TransportError, default_name
from aiodaft_transport.cuda.libcuda import CudaDriver

_SIZE: Final = 1 << 20
_PATIENCE: Final = 20.0


async def examine() -> int:
    """Print the findings; 0 if actors work here, else 1."""
    _say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("uvloop", "torch", "numpy"):
        _say(package, _version(package) or "not installed")
    _say("gpus", str(len(gpu_names(machine_gpus()))))
    _say("cpus", str(len(os.sched_getaffinity(0))))
    _say("open files", f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} per process")
    working = 0
    for name in NAMES:
        trouble, seconds = await _try_transport(name)
        default = ", the default" if name == default_name() else ""
        found = (
            f"does not work: {trouble}"
            if trouble
            else f"works{default}: 1 MiB there and back in {seconds * 1e3:.1f} ms"
        )
        _say(f"transport {name}", found)
        working += not trouble
    _say("transport cuda", await _try_cuda())
    return 0 if working else 1


async def _try_transport(name: str) -> tuple[str, float]:
    """Why a transport does not work ("" if it does), and how long a message took."""
    value = bytes(_SIZE)
    try:
        async with asyncio.timeout(_PATIENCE), Runtime(transport=name, preload=()) as rt, rt.spawn(Echo) as echo:
            await echo.on_loop(value)
            start = time.perf_counter()
            if await echo.on_loop(value) != value:
                return "what came back is not what was sent", 0.0
            return "", time.perf_counter() - start
    except TransportError as error:
        return str(error), 0.0
    except Exception as error:  # noqa: BLE001 - every error is a finding
        return f"{type(error).__name__}: {error}", 0.0


async def _try_cuda() -> str:
    """Whether GPU memory goes from process to process, or why it does not."""
    try:
        CudaDriver().close()
        import torch  # noqa: PLC0415 - optional package

        value = torch.arange(_SIZE, dtype=torch.uint8, device="cuda")
        async with asyncio.timeout(_PATIENCE), Runtime(preload=()) as rt, rt.spawn(Echo) as echo:
            await echo.on_loop(value)
            start = time.perf_counter()
            same = torch.equal(await echo.on_loop(value), value)
            seconds, direct = time.perf_counter() - start, rt.traffic().device_received
    except TransportError as error:
        return f"does not work: {error}"
    except Exception as error:  # noqa: BLE001 - every error is a finding
        return f"does not work: {type(error).__name__}: {error}"
    if not same or not direct:
        return (
            f"does not work: {'the value went by route of host memory' if same else 'what came back is not the same'}"
        )
    return f"works, for CUDA tensors: 1 MiB there and back in {seconds * 1e3:.1f} ms"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _say(what: str, found: str) -> None:
    print(f"{what:16} {found}", flush=True)
