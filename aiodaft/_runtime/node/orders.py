"""The messages between the launcher and the fork server: arrays that begin with one of these numbers."""

from __future__ import annotations

from typing import Final

# Number, working directory, sys.path, changes to the environment, modules to import before forking, variables for the
# worker alone, settings of the worker; with descriptors.
SPAWN: Final = 1
KILL: Final = 2  # number, signal
SPAWNED: Final = 3  # number, pid
EXITED: Final = 4  # number, pid, exit code, signal
FAILED: Final = 5  # number, text
STACK_REQUESTED: Final = 6  # no number (0), pid of the fork server outside of its PID namespace
IMPORTING: Final = 7  # no number (0), name of the module that is being imported
