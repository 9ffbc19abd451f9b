"""Hides functions of Linux alone: with this folder on PYTHONPATH, Python and its children have those of macOS.

Before aiodaft is imported, it takes away functions and constants, has the kernel refuse sockets, and hides /proc and
/dev/shm. The rest is checked to be enough for development; other behaviour of macOS is not seen here.
"""

from __future__ import annotations

import _socket
import builtins
import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

_HIDDEN = ("/proc", "/dev/shm", "/sys/fs/cgroup")
_GONE = {
    os: (
        "memfd_create", "eventfd", "eventfd_read", "eventfd_write", "pidfd_open", "sched_getaffinity",
        "sched_setaffinity", "pipe2", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "EFD_CLOEXEC", "EFD_NONBLOCK",
        "O_TMPFILE", "O_PATH", "splice", "copy_file_range", "posix_fallocate", "waitid", "setns",
        "unshare", "getrandom",
    ),
    socket: (
        "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "MSG_CMSG_CLOEXEC", "SOCK_CLOEXEC", "SOCK_NONBLOCK",
        "SO_DOMAIN", "SO_PROTOCOL", "MSG_NOSIGNAL", "SO_INCOMING_CPU",
    ),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "sigtimedwait", "sigwaitinfo"),
    fcntl: (
        "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SETPIPE_SZ",
        "F_GETPIPE_SZ",
    ),
    time: ("pthread_getcpuclockid",),
    mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_WRITE", "MADV_REMOVE", "MAP_POPULATE"),
    select: ("epoll",),
}  # fmt: skip


def _is_hidden(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return any(text == hidden or text.startswith(f"{hidden}/") for hidden in _HIDDEN)


def _hide_paths(module: Any, name: str) -> None:
    real: Callable[..., Any] = getattr(module, name)

    def seen(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if _is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *arguments, **options)

    setattr(module, name, seen)


def _hide_prctl() -> None:
    real = ctypes.CDLL.__getattr__

    def find(library: ctypes.CDLL, name: str) -> Any:
        if name in {"prctl", "process_vm_readv", "process_vm_writev", "memfd_create", "eventfd"}:
            raise AttributeError(name)
        return real(library, name)

    ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]


def _refuse_sockets() -> None:
    real = _socket.socketpair

    def pair(family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> Any:
        if kind == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        return real(family, kind, protocol)

    _socket.socketpair = pair
    for name in ("bind", "connect", "connect_ex"):
        _refuse_abstract(name)


def _refuse_abstract(name: str) -> None:
    real = getattr(socket.socket, name)

    def checked(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX and os.fsencode(address).startswith(b"\0"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(self, address)

    setattr(socket.socket, name, checked)


# uvloop and OpenSSL are written in C and see the whole system; the functions that they need are there on macOS, too.
for _module, _names in _GONE.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
for _name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "statvfs", "access"):
    _hide_paths(os, _name)
_hide_paths(builtins, "open")
_hide_prctl()
_refuse_sockets()
