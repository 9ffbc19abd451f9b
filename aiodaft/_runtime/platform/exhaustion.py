"""Errors for resources that the operating system refuses: the limit, and the remedy."""

from __future__ import annotations

import errno
import resource
from typing import Final

from aiodaft._runtime.platform.linux import visible_pid
from aiodaft.exceptions import ResourceExhausted

_LARGEST: Final = {resource.RLIM_INFINITY: "unlimited"}


def exhausted(error: OSError, what: str) -> ResourceExhausted:
    """The error for a value that this process has no descriptor, memory or thread for."""
    return ResourceExhausted(refusal(error, what))


def refusal(error: OSError, what: str) -> str:
    """The text of a refusal: the resource, the reason and the remedy."""
    process, text = f"process {visible_pid()}", error.strerror or str(error)
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = (
            f"{process} has no file descriptors left, its limit is {soft}: close some, or raise the limit before the "
            f"program starts (`ulimit -n`, at most {_LARGEST.get(hard, hard)})"
        )
    elif error.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        reason = (
            f"{process} may make no file, and no shared memory, of more than {soft} bytes: raise the limit before the "
            "program starts (`ulimit -f`)"
        )
    elif error.errno == errno.ENFILE:
        reason = "the machine has no file descriptors left: close some, or raise the limit (`sysctl fs.file-max`)"
    elif error.errno == errno.EAGAIN:
        reason = (
            f"{process} gets no further thread ({text}): raise the limit of its user (`ulimit -u`) or of its container "
            "(pids), or stop other processes"
        )
    elif error.errno in {errno.ENOMEM, errno.ENOSPC}:
        reason = f"{process} gets no memory for it ({text}): free some, or raise the limit of its container"
    else:
        reason = f"{process} is refused it: {text}"
    return f"{what}: {reason}"
