"""What a worker gets from the controller: its settings, environment, working directory, sys.path and sys.argv."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._runtime.platform.linux import importable_path
from aiodaft._runtime.process import ProcessOptions
from aiodaft.exceptions import SpawnFailed


class WorkerEnvironment(NamedTuple):
    """These four at the spawn of an actor."""

    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]

    @classmethod
    def here(cls) -> WorkerEnvironment:
        """These four in this process now.

        Raises:
            SpawnFailed: The working directory does not exist any more.
        """
        try:
            directory = os.getcwd()
        except OSError as error:
            raise SpawnFailed(
                f"an actor needs the working directory of this process, which is gone ({error}): "
                "call os.chdir() with one that exists, and spawn again"
            ) from error
        return cls(dict(os.environ), directory, importable_path(), [str(argument) for argument in sys.argv])

    def changes(self, base: dict[str, str]) -> dict[str, str | None]:
        """The changes from an earlier environment; None for a variable that is gone."""
        changes: dict[str, str | None] = dict.fromkeys(base.keys() - self.environment.keys())
        changes.update((name, value) for name, value in self.environment.items() if base.get(name) != value)
        return changes


def change_environment(base: dict[str, str], changes: dict[str, str | None]) -> None:
    """Set this process's environment to an earlier one with changes."""
    wanted = {name: value for name, value in {**base, **changes}.items() if value is not None}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in wanted.items() if os.environ.get(name) != value)


class WorkerSettings(NamedTuple):
    """The settings of a worker; they travel as plain data."""

    options: ProcessOptions
    key: bytes
    uvloop: bool
    log_level: int
    argv: list[str]

    def packed(self) -> bytes:
        return pack([list(self.options), *self[1:]])

    @classmethod
    def unpacked(cls, data: bytes) -> WorkerSettings:
        options, *others = unpack(data)
        return cls(ProcessOptions(*options), *others)
