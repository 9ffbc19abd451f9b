"""The surroundings of a worker, as in the controller: variables, working directory, sys.path, sys.argv, log levels."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, cast

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.options import Levels, levels_here
from aiodaft._runtime.platform.linux import fresh_python, importable_path
from aiodaft._runtime.process import ProcessOptions
from aiodaft.exceptions import SpawnFailed

# Read by OpenMP, MKL, OpenBLAS and torch.
_THREADS: Final = "OMP_NUM_THREADS"
_WORKER: Final = "aiodaft._runtime.node.worker_main"


class WorkerEnvironment(NamedTuple):
    """These in the process that spawns an actor.

    Attributes:
        code: The folders of the actor's machine with code that the program has shipped.
        terminal: The path of the terminal at which the program runs in the foreground; empty without one.
        own: Variables of the actor alone, for which it gets a new interpreter.
        cwd: The working directory that it must have; empty: that of the process that spawns it.
        python: Its interpreter; empty: that of its node.
    """

    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    code: Sequence[str] = ()
    terminal: str = ""
    levels: Levels = MappingProxyType({})
    own: Mapping[str, str] = MappingProxyType({})
    cwd: str = ""
    python: str = ""

    @classmethod
    def here(cls, own: Mapping[str, str] | None = None, cwd: str = "", python: str = "") -> WorkerEnvironment:
        """These in this process now.

        Raises:
            SpawnFailed: The working directory does not exist any more.
        """
        try:
            directory = cwd or os.getcwd()
        except OSError as error:
            raise SpawnFailed(
                f"an actor needs the working directory of this process, which is gone ({error}): "
                "call os.chdir() with one that exists, and spawn again"
            ) from error
        argv = [str(argument) for argument in sys.argv]
        path = _path_of_program() if python else importable_path()
        return cls(dict(os.environ), directory, path, argv, (), _terminal(), levels_here(), own or {}, cwd, python)

    def as_far_as_it_is_here(self) -> WorkerEnvironment:
        """The same for another machine or an actor: its folders where they exist, and the variables of this process."""
        directory = self.directory if self.cwd or os.path.isdir(self.directory) else os.getcwd()
        path = [entry for entry in self.path if os.path.exists(entry)]
        if not self.python:
            path += [entry for entry in importable_path() if entry not in path]
        return self._replace(environment=dict(os.environ), directory=directory, path=path, terminal="")

    def for_share(self, cpus: float, gpus: Sequence[str]) -> dict[str, str]:
        """Variables that say what a worker may use of its machine; `gpus` has names for CUDA_VISIBLE_DEVICES."""
        variables = dict(self.own)
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if cpus and _THREADS not in self.environment | variables:
            variables[_THREADS] = str(max(1, int(cpus)))
        return variables

    def changes(self, base: dict[str, str]) -> dict[str, str | None]:
        changes: dict[str, str | None] = dict.fromkeys(base.keys() - self.environment.keys())
        changes.update((name, value) for name, value in self.environment.items() if base.get(name) != value)
        return changes

    def interpreter(self, node: str) -> str:
        """The interpreter that has to be started for the actor; empty if it may be forked.

        Raises:
            SpawnFailed: The machine has no such interpreter or working directory.
        """
        if self.cwd and not os.path.isdir(self.cwd):
            raise SpawnFailed(f"on(cwd={self.cwd!r}): {node} has no such folder")
        if self.python and shutil.which(self.python) is None:
            raise SpawnFailed(f"on(python={self.python!r}): {node} has no such interpreter")
        return self.python or (sys.executable if self.own else "")


def _path_of_program() -> list[str]:
    """The entries of sys.path that this interpreter, or its virtual environment, does not have of itself."""
    of_python = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    inside = tuple(os.path.join(folder, "") for folder in of_python)
    found = [entry for entry in importable_path() if os.path.exists(entry or os.curdir)]
    return [entry for entry in found if entry not in of_python and not entry.startswith(inside)]


def _terminal() -> str:
    """The terminal of this process, if that is in the foreground and is no interpreter that reads commands."""
    with suppress(OSError):
        if not hasattr(sys, "ps1") and os.tcgetpgrp(0) == os.getpgrp():
            return os.ttyname(0)
    return ""


def change_environment(base: dict[str, str], changes: dict[str, str | None]) -> None:
    wanted = {name: value for name, value in {**base, **changes}.items() if value is not None}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in wanted.items() if os.environ.get(name) != value)


class WorkerSettings(NamedTuple):
    """The settings of a worker; they travel as plain data.

    Attributes:
        secret: The key of a runtime of one machine, or the whole identity of a cluster.
        digests: The code that its own actors are to be spawned with; the node has it.
    """

    options: ProcessOptions
    secret: bytes
    uvloop: bool
    levels: Levels
    argv: list[str]
    digests: Sequence[str] = ()
    terminal: str = ""

    def packed(self) -> bytes:
        options = self.options._replace(patience=list(self.options.patience))
        return pack([list(options), *self[1:-2], list(self.digests), self.terminal])

    @classmethod
    def unpacked(cls, data: bytes) -> WorkerSettings:
        options, *others = unpack(data)
        return cls(ProcessOptions(*options), *others)


class Spawn(NamedTuple):
    """Start a worker; has its descriptors."""

    worker: PeerId
    directory: str
    path: list[str]
    # Folders in front of `path`, for this worker alone.
    code: list[str]
    # To the environment of the fork server; None removes a variable.
    changes: dict[str, str | None]
    # To be imported before the fork.
    modules: list[str]
    # Variables for this worker alone.
    environment: dict[str, str]
    settings: bytes
    # The interpreter to be started; empty: the worker may be forked.
    python: str = ""


class Kill(NamedTuple):
    worker: PeerId
    signal: int


class Spawned(NamedTuple):
    worker: PeerId
    pid: int


class Failed(NamedTuple):
    worker: PeerId
    why: str


class Exited(NamedTuple):
    """A worker ended; exit code and signal are None if unknown."""

    worker: PeerId
    exit_code: int | None
    signal: str | None


class Importing(NamedTuple):
    module: str


class Unforkable(NamedTuple):
    """The import of a module has initialised CUDA: from now on workers are new interpreters."""

    module: str


class Visited(NamedTuple):
    """A command wants to ask something; has the pid of the fork server."""

    pid: int


Message: TypeAlias = Spawn | Kill | Spawned | Failed | Exited | Importing | Unforkable | Visited

_KINDS: Final[tuple[type[Message], ...]] = (Spawn, Kill, Spawned, Failed, Exited, Importing, Unforkable, Visited)


def packed(message: Message) -> bytes:
    return pack([_KINDS.index(type(message)), *message])


def unpacked(data: bytes) -> Message:
    kind, *fields = unpack(data)
    made: Message = cast("Any", _KINDS[kind])(*fields)
    return made


# In place of a descriptor: the kernel ends the worker with its parent.
BY_KERNEL: Final = -1


def start_fresh(
    order: Spawn, environment: Mapping[str, str], fds: Sequence[int], lifeline: int = BY_KERNEL
) -> subprocess.Popen[bytes]:
    """Start a worker, in a session of its own; the caller closes its descriptors here.

    Args:
        environment: That of all workers; the order may add to it.
        fds: Those of its connection, its output, its errors and its heartbeat.
        lifeline: The pipe that it reads, and with which it ends: the pipe ends with the process that starts it.

    Raises:
        OSError: The machine refuses it.
    """
    import tempfile  # noqa: PLC0415 - takes long to import, and few workers are started so

    connection, out, err, heartbeat = fds
    kept = [fd for fd in (connection, heartbeat, lifeline) if fd >= 0]
    # A pipe has no room for any settings, and nothing reads it yet.
    with tempfile.TemporaryFile(prefix="aiodaft-") as settings:
        settings.write(order.settings)
        settings.seek(0)
        numbers = connection, settings.fileno(), heartbeat, lifeline
        return subprocess.Popen(
            fresh_python(
                "aiodaft._runtime.node.worker_main", *numbers, front=order.code, path=order.path, python=order.python
            ),
            env={**environment, **order.environment},
            cwd=order.directory,
            pass_fds=(*kept, settings.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
