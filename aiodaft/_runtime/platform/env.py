"""The seam for time, randomness, identity and timeouts, so that a runtime can be simulated; and claims on GPUs."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.resources import Gpu
from aiodaft._protocol.node.worker import PERIOD
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft.exceptions import InsufficientResources

# Claims on GPUs, so that two runtimes of a machine do not give the same GPU to their actors. A claim is a listening
# unix socket, named after the GPU in the abstract namespace. The kernel gives a name to one socket at a time, frees it
# when the process ends, and tells which process listens: no file is left behind. Processes in different network
# namespaces do not see each other's claims.

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


@dataclass(slots=True)
class Timeouts:
    """The times that the runtime waits, in seconds.

    Attributes:
        answer: For the answer of a process to the order to stop an actor, at least.
        report: For the answer of an actor's process to `rt.info`.
        exit_report: After a connection is lost.
        blame: For callers of a dead actor to report that its end failed their calls; else its scope gets the error.
        silence: Between two looks at a connection to a node of another machine.
    """

    answer: float = 1.0
    report: float = 1.0
    exit_report: float = 2.0
    blame: float = 0.1
    kill: float = 1.0
    fork_server_end: float = 5.0
    fork_server_look: float = 1.0
    silence: float = PERIOD


@dataclass(frozen=True, slots=True)
class Env:
    """The sources of everything that differs from run to run.

    Attributes:
        monotonic: Seconds of a clock that never jumps.
        random: Of choices that need not be secret; `token` is secret.
        thread: Makes a thread beside a loop, from the thread's name and the loop.
        remembered: The number of ended processes that are remembered.
        launcher: Takes the arguments of `WorkerLauncher`. None: that, or `ExecLauncher` where there is no fork server.
        network: See `far.Network`. None: TCP, with the key of the cluster.
    """

    monotonic: Callable[[], float] = time.monotonic
    random: random.Random = field(default_factory=random.Random)
    token: Callable[[int], bytes] = os.urandom
    gpus: Callable[[], Sequence[Gpu]] = machine_gpus
    hostname: Callable[[], str] = lambda: os.uname().nodename or "localhost"
    pid: Callable[[], int] = os.getpid
    sockets: Sockets = field(default_factory=Sockets)
    thread: Callable[[str, asyncio.AbstractEventLoop], HelperThread] = HelperThread
    remembered: int = 1024
    launcher: Callable[..., Any] | None = None
    network: Any = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def new_peer_id(self, kind: str, node: str = "") -> PeerId:
        return PeerId(f"{kind}-{self.token(6).hex()}" + (f"@{node}" if node else ""))
