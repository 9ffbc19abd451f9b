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


def prefix_of(isolation: str | None, unshare: tuple[str, ...] = _UNSHARE) -> tuple[str, ...]:
    """The command that starts the fork server in its isolation. Blocks for some milliseconds: the command is tried.

    Raises:
        ValueError: There is no such isolation.
        SpawnFailed: The machine does not allow it; says why.
    """
    if isolation is None:
        return ()
    if isolation != "pidns":
        raise ValueError(f'isolation={isolation!r}: there is None, and "pidns"')
    problems: list[str] = []
    for rights in ((), _ROOTLESS) if os.geteuid() == 0 else (_ROOTLESS,):
        command = [*unshare, *rights, "true"]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(str(getattr(error, "stderr", "") or error).strip())
        else:
            return (*unshare, *rights)
    raise SpawnFailed(f'isolation="pidns" does not work here: {"; ".join(problems)}')
