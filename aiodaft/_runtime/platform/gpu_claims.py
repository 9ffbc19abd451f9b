"""Claims on GPUs, so that two runtimes of a machine do not give the same GPU to their actors.

A claim is a listening unix socket, named after the GPU in the abstract namespace. The kernel gives a name to one socket
at a time, frees it when the process ends, and tells which process listens: no file is left behind. Processes in
different network namespaces do not see each other's claims.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from aiodaft._protocol.node.resources import Gpu
from aiodaft.exceptions import InsufficientResources

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
    told: dict[str, str] = {}
    with suppress(OSError), open(f"{driver}/{place}/information", encoding="utf-8", errors="replace") as file:
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in file)}
    uuid = told.get("GPU UUID", "")
    minor = told.get("Device Minor", "")
    # Until its first use, a GPU has question marks for an id.
    return Gpu(f"nvidia{minor}" if minor else place, "" if "?" in uuid else uuid)


_CREDENTIALS: Final = struct.Struct("3i")
_LONGEST_COMMAND: Final = 200


class GpuClaims:
    """The claims of one runtime. A GPU without an id was declared by hand, and is not claimed."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self._held: dict[int, socket.socket] = {}
        self._refused: set[int] = set()

    def take(self, gpu: int) -> str | None:
        """Claim a GPU, by its number in the runtime. Idempotent.

        Returns:
            The process of another runtime that has it; None if the claim succeeds.

        Raises:
            InsufficientResources: The machine refuses sockets.
        """
        if gpu in self._held or gpu >= len(self._ids) or not self._ids[gpu]:
            return None
        name = self._name(gpu)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(name)
            claim.listen()
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                self._refused.add(gpu)
                return _holder(name)
            raise InsufficientResources(f"GPU {gpu} cannot be claimed: {error}") from error
        self._held[gpu] = claim
        self._refused.discard(gpu)
        return None

    def give_back(self, gpu: int) -> None:
        claim = self._held.pop(gpu, None)
        if claim is not None:
            claim.close()

    async def given_back(self) -> None:
        """Wait until another runtime gives back a GPU that was refused here; for ever if it cannot be told when.

        The end of a connection to its socket tells: no process accepts it, and it ends with the claim.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        questions: list[socket.socket] = []
        try:
            for gpu in list(self._refused):
                try:
                    questions.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    questions[-1].setblocking(False)
                    questions[-1].connect(self._name(gpu))
                except ConnectionRefusedError:
                    self._refused.discard(gpu)
                    return
                except OSError:
                    # The queue of connections is full, or there are no descriptors.
                    continue
                loop.add_reader(questions[-1], _settle, over)
            await over
        finally:
            for question in questions:
                loop.remove_reader(question)
                question.close()

    def _name(self, gpu: int) -> str:
        return f"\0aiodaft-gpu-{self._ids[gpu]}"

    def close(self) -> None:
        """In a forked child, the copies of the sockets stay the parent's claims."""
        for gpu in list(self._held):
            self.give_back(gpu)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _holder(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(name)
            found = question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            # It has just ended, or its queue of connections is full.
            return "another process"
    pid, _, _ = _CREDENTIALS.unpack(found)
    try:
        with open(f"/proc/{pid}/cmdline", errors="replace", encoding="utf-8") as file:
            command = file.read().replace("\0", " ").strip()
    except OSError:
        return f"pid {pid}" if pid else "a process of another container"
    return f"pid {pid} ({command[:_LONGEST_COMMAND]})"
