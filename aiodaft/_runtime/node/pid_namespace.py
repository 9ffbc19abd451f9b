"""How actors are kept apart from the rest of the machine: nothing, or a PID namespace of their own.

The fork server is the first process of the namespace, so the kernel kills everything in it when the fork server ends,
also by SIGKILL, and whatever sessions, groups and daemons the actors have made of themselves.
"""

from __future__ import annotations

import os
import subprocess
from typing import Final

from aiodaft.exceptions import SpawnFailed

# The namespace ends with `unshare`, and `unshare` with the thread that has started it.
_UNSHARE: Final = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child")
# What makes it possible without privileges, and without seeming to be root.
_ROOTLESS: Final = ("--user", "--map-current-user")
_PATIENCE: Final = 5.0


def prefix_of(isolation: str | None, unshare: tuple[str, ...] = _UNSHARE) -> tuple[str, ...]:
    """The command that starts the fork server in its isolation. Blocks for some milliseconds: the command is tried.

    Args:
        isolation: What the user asked for.
        unshare: Makes a PID namespace.

    Raises:
        ValueError: There is no such isolation.
        SpawnFailed: It cannot be had on this machine; says why.
    """
    if isolation is None:
        return ()
    if isolation != "pidns":
        raise ValueError(f'isolation={isolation!r}: there is None, and "pidns"')
    rootless = (*unshare, *_ROOTLESS)
    problems: list[str] = []
    for prefix in (unshare, rootless) if os.geteuid() == 0 else (rootless,):
        problem = _try(prefix)
        if problem is None:
            return prefix
        problems.append(problem)
    raise SpawnFailed(f'isolation="pidns" cannot be had here: {"; ".join(problems)}')


def _try(prefix: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(
            [*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"{prefix[0]} returned {done.returncode}"
