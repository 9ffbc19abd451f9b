"""Reads NVIDIA's GPUs and driver without loading a library or initialising CUDA."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from typing import Final

from aiodaft._protocol.node.gpu_names import Gpu

_DRIVER: Final = "/proc/driver/nvidia/gpus"
_DEVICES: Final = "/dev"
_LIBRARY: Final = "libcuda.so.1"
_NOT_INITIALIZED: Final = 3


def machine_gpus(driver: str = _DRIVER, devices: str = _DEVICES) -> list[Gpu]:
    """The NVIDIA GPUs that this process can reach, in the order of their numbers.

    The driver lists all GPUs of the machine, by their places on the bus. A container may have the device files of some
    of them, and a sandbox (gVisor) may have device files alone.
    """
    files = sorted(
        (name for name in _listed(devices) if re.fullmatch(r"nvidia\d+", name)), key=lambda name: int(name[6:])
    )
    known = [_gpu_at(driver, place) for place in sorted(_listed(driver))]
    # Before the first use of a GPU there may be no device file.
    return [gpu for gpu in known if gpu.device in files or not files] or [Gpu(name) for name in files]


def has_initialized_cuda() -> bool:
    """Whether this process has initialised CUDA, which its forked children cannot use then."""
    try:
        # Only if it is loaded.
        library = ctypes.CDLL(_LIBRARY, os.RTLD_LAZY | os.RTLD_NOLOAD)
    except (AttributeError, OSError):
        return False
    return bool(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _gpu_at(driver: str, place: str) -> Gpu:
    """The GPU at a place on the bus; named by the place if the driver says no more."""
    told: dict[str, str] = {}
    with suppress(OSError), open(f"{driver}/{place}/information", encoding="utf-8", errors="replace") as file:
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in file)}
    uuid = told.get("GPU UUID", "")
    minor = told.get("Device Minor", "")
    # Until its first use, a GPU has question marks for an id.
    return Gpu(f"nvidia{minor}" if minor else place, "" if "?" in uuid else uuid)
