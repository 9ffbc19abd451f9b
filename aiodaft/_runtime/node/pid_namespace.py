"""PID namespaces: an option to isolate the processes of actors from the rest of the machine.

The fork server is the first process of the namespace. When it ends, also by SIGKILL, the kernel kills every process in
the namespace, in any session or group.
"""

from __future__ import annotations

import os
import subprocess
from typing import Final

from aiodaft.exceptions import SpawnFailed

# The namespace ends with `unshare`, and `unshare` with the thread that has started it.
_UNSHARE: Final = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child")
# For users without privileges.
_ROOTLESS: Final = ("--user", "--map-current-user")
_PATIENCE: Final = 5.0


def prefix_of(isolation: str | None, unshare: tuple[str, ...] = _UNSHARE) -> tuple[str, ...]:
    """The command that starts the fork server in its isolation. Blocks for some milliseconds: the command is tried.

    Args:
        isolation: What the user asked for.
        unshare: Makes a PID namespace.

    Raises:
        ValueError: There is no such isolation.
        SpawnFailed: The machine does not allow it; says why.
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
    raise SpawnFailed(f'isolation="pidns" does not work here: {"; ".join(problems)}')


def _try(prefix: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(
            [*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"{prefix[0]} returned {done.returncode}"
