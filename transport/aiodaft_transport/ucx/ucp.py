"""libucp through ctypes: only the functions that pulling memory needs, one Python call per UCX call.

The library is the system's UCX, which may have verbs, else that of the wheel `libucx-cu13` or `libucx-cu12`. Handles
are plain integers. A `Worker` belongs to one thread.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_ssize_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiodaft_transport.exceptions import TransportError, Unreachable

LIBRARY_VARIABLE: Final = "AIODAFT_UCX_LIBRARY"
_SONAME: Final = "libucp.so.0"
# Two versions in one process would mix, because their libraries have the same names: ask in another process.
_PROBE: Final = f"""
import ctypes
numbers = [ctypes.c_uint() for _ in range(3)]
ctypes.CDLL({_SONAME!r}).ucp_get_version(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers))
"""


def load() -> Library:
    """Raises Unreachable: there is none; the message names the package to install."""
    return _load(os.environ.get(LIBRARY_VARIABLE) or None)


@functools.cache
def _load(chosen: str | None) -> Library:
    problems: list[str] = []
    for path in [chosen] if chosen else _candidates():
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            problems.append(str(error))
            continue
        if library.version >= OLDEST:
            return library
        problems.append(f"{path} is UCX {'.'.join(map(str, library.version))}")
    said = f"${LIBRARY_VARIABLE} names none" if chosen else "none was found"
    raise Unreachable(
        f"transport 'ucx' needs UCX {'.'.join(map(str, OLDEST))} or later, and {said} ({'; '.join(problems)}); "
        "install the system's (libucx0, ucx) or `pip install aiodaft[ucx-cu13]`"
    )


def _candidates() -> Iterator[str]:
    # Not imported: that would load all of it.
    wheel = importlib.util.find_spec("libucx")
    folders = (wheel.submodule_search_locations or ()) if wheel is not None else ()
    if not folders or _system_version() >= OLDEST:
        yield _SONAME
    for folder in folders:
        yield str(Path(folder) / "lib" / _SONAME)


def _system_version() -> tuple[int, ...]:
    probe = subprocess.run([sys.executable, "-ISc", _PROBE], capture_output=True, text=True, check=False)
    return tuple(map(int, probe.stdout.split()))


# Older versions (1.13 to 1.20 were tried) crash or hang when a peer is killed while shared memory is in use.
OLDEST: Final = (1, 21)

_OK: Final = 0
_ERR_BUSY: Final = -15

_FEATURE_RMA: Final = 1 << 1
_FEATURE_WAKEUP: Final = 1 << 4
_THREAD_MODE_SINGLE: Final = 0
_ERROR_HANDLING_PEER: Final = 1
_MEMORY_TYPE_HOST: Final = 0
_CLOSE_FORCE: Final = 1
_CALLBACK: Final = 1 << 1
_USER_DATA: Final = 1 << 2
_FLAGS: Final = 1 << 4
_MEMORY_TYPE: Final = 1 << 6
_MEMH: Final = 1 << 8

# ucs_status_t is packed into one byte; the rest of the register is garbage.
_Status = ctypes.c_int8

_OnCompleted = ctypes.CFUNCTYPE(None, c_void_p, _Status, c_void_p)
_OnFailed = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, _Status)


class UcxError(TransportError): ...


class _Params(ctypes.Structure):
    """`rest`, here and below: fields that the mask leaves out."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("rest", c_char * 128),
    ]


class _WorkerParams(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("thread_mode", c_int), ("rest", c_char * 256)]


class _EndpointParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_callback", _OnFailed),
        ("err_arg", c_void_p),
        ("rest", c_char * 128),
    ]


class _MapParams(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("rest", c_char * 128)]


class _RequestParam(ctypes.Structure):
    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", _OnCompleted),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("rest", c_char * 64),
    ]


# Name: result, arguments. These functions may take long, and release the GIL.
_LONG: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ucp_get_version": (None, [POINTER(c_uint), POINTER(c_uint), POINTER(c_uint)]),
    "ucs_global_opts_set_value": (_Status, [c_char_p, c_char_p]),
    "ucs_status_string": (c_char_p, [_Status]),
    "ucp_config_read": (_Status, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "ucp_config_modify": (_Status, [c_void_p, c_char_p, c_char_p]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (_Status, [c_uint, c_uint, POINTER(_Params), c_void_p, POINTER(c_void_p)]),
    "ucp_cleanup": (None, [c_void_p]),
    "ucp_worker_create": (_Status, [c_void_p, POINTER(_WorkerParams), POINTER(c_void_p)]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (_Status, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (_Status, [c_void_p, POINTER(c_int)]),
    "ucp_ep_create": (_Status, [c_void_p, POINTER(_EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_close_nbx": (c_ssize_t, [c_void_p, POINTER(_RequestParam)]),
    "ucp_mem_map": (_Status, [c_void_p, POINTER(_MapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (_Status, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (_Status, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (_Status, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
}
# These are short, and keep the GIL: getting it back from a busy thread takes 5 ms.
_SHORT: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_worker_arm": (_Status, [c_void_p]),
    "ucp_get_nbx": (c_ssize_t, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParam)]),
    "ucp_request_free": (None, [c_void_p]),
}


class Library:
    def __init__(self, path: str) -> None:
        handlers = _signal_handlers()
        try:
            long, short = ctypes.CDLL(path), ctypes.PyDLL(path)
        finally:
            # Loading UCX installs handlers of signals, SIGSEGV and SIGHUP among them; a library must not.
            _set_signal_handlers(handlers)
        for functions, library in ((_LONG, long), (_SHORT, short)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        major, minor, release = c_uint(), c_uint(), c_uint()
        long.ucp_get_version(byref(major), byref(minor), byref(release))
        self.version = (major.value, minor.value, release.value)
        if "UCX_LOG_LEVEL" not in os.environ:
            # UCX logs to standard output; status codes report the same errors.
            long.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def make(self, what: str, function: Callable[..., int], *arguments: Any) -> int:
        made = c_void_p()
        self.check(function(*arguments, byref(made)), what)
        return made.value or 0

    def check(self, status: int, what: str) -> None:
        if status < 0:
            raise UcxError(f"{what}: {self.text(status)}")

    def text(self, status: int) -> str:
        text: bytes = self.ucs_status_string(status)
        return text.decode()


class Worker:
    """Memory may be registered and unregistered in any thread."""

    def __init__(self, library: Library, options: Mapping[str, str]) -> None:
        self.library = library
        # The number of an operation or endpoint, and its status.
        self.completed: deque[tuple[int, int]] = deque()
        self.failed: deque[tuple[int, int]] = deque()
        self._memories: set[int] = set()
        # Reentrant: a garbage collection meanwhile may unregister memory.
        self._memories_lock = threading.RLock()
        self._context = _init(library, options)
        self._worker = 0
        try:
            params = _WorkerParams(field_mask=1, thread_mode=_THREAD_MODE_SINGLE)
            self._worker = library.make("no worker", library.ucp_worker_create, self._context, byref(params))
            address, size, fd = c_void_p(), c_size_t(), c_int()
            library.check(library.ucp_worker_get_address(self._worker, byref(address), byref(size)), "no address")
            self.address = ctypes.string_at(address, size.value)
            library.ucp_worker_release_address(self._worker, address)
            library.check(library.ucp_worker_get_efd(self._worker, byref(fd)), "no event descriptor")
            self.event_fd = fd.value
        except BaseException:
            self.destroy()
            raise
        # The callbacks do not refer to this object, so that it is freed without the garbage collector.
        completed, failed, free = self.completed, self.failed, library.ucp_request_free

        def on_completed(request: int, status: int, number: int) -> None:
            free(request)
            completed.append((number, status))

        def on_failed(number: int, endpoint: int, status: int) -> None:
            failed.append((number, status))

        self._on_completed = _OnCompleted(on_completed)
        self._on_failed = _OnFailed(on_failed)
        self._get = _RequestParam(
            op_attr_mask=_CALLBACK | _USER_DATA | _MEMORY_TYPE | _MEMH,
            callback=self._on_completed,
            memory_type=_MEMORY_TYPE_HOST,
        )

    def progress(self) -> int:
        done: int = self.library.ucp_worker_progress(self._worker)
        return done

    def arm(self) -> bool:
        """False if there is an event already."""
        status = self.library.ucp_worker_arm(self._worker)
        if status == _ERR_BUSY:
            return False
        self.library.check(status, "the worker cannot be waited for")
        return True

    def connect(self, address: bytes, number: int) -> int:
        """If the endpoint breaks, `failed` gets `number`."""
        copy = ctypes.create_string_buffer(address, len(address))
        params = _EndpointParams(
            field_mask=0b111,
            address=ctypes.addressof(copy),
            err_mode=_ERROR_HANDLING_PEER,
            err_callback=self._on_failed,
            err_arg=number,
        )
        return self.library.make("no endpoint", self.library.ucp_ep_create, self._worker, byref(params))

    def disconnect(self, endpoint: int, number: int) -> bool:
        """Close an endpoint by force: its operations fail. True if it is closed, else `completed` gets `number`."""
        params = _RequestParam(
            op_attr_mask=_CALLBACK | _USER_DATA | _FLAGS,
            flags=_CLOSE_FORCE,
            callback=self._on_completed,
            user_data=number,
        )
        # If this fails, the endpoint is closed already.
        return int(self.library.ucp_ep_close_nbx(endpoint, byref(params))) <= 0

    def get(self, endpoint: int, target: int, nbytes: int, source: int, rkey: int, memory: int, number: int) -> bool:
        """True if the copy is done, else `completed` gets `number`."""
        params = self._get
        params.user_data = number
        params.memh = memory
        result: int = self.library.ucp_get_nbx(endpoint, target, nbytes, source, rkey, byref(params))
        if result < 0:
            self.library.check(result, "the transfer cannot begin")
        return result == _OK

    def register(self, address: int, nbytes: int) -> int:
        params = _MapParams(field_mask=0b11, address=address, length=nbytes)
        what = f"{nbytes} bytes cannot be registered"
        handle = self.library.make(what, self.library.ucp_mem_map, self._context, byref(params))
        with self._memories_lock:
            self._memories.add(handle)
        return handle

    def unregister(self, memory: int) -> None:
        with self._memories_lock:
            if memory in self._memories:
                self._memories.discard(memory)
                self.library.ucp_mem_unmap(self._context, memory)

    def pack(self, memory: int) -> bytes:
        buffer, size = c_void_p(), c_size_t()
        status = self.library.ucp_rkey_pack(self._context, memory, byref(buffer), byref(size))
        self.library.check(status, "no key of the memory")
        try:
            return ctypes.string_at(buffer, size.value)
        finally:
            self.library.ucp_rkey_buffer_release(buffer)

    def unpack(self, endpoint: int, packed: bytes) -> int:
        return self.library.make("an unusable key", self.library.ucp_ep_rkey_unpack, endpoint, packed)

    def forget(self, rkey: int) -> None:
        if self._worker:
            self.library.ucp_rkey_destroy(rkey)

    def destroy(self) -> None:
        """Afterwards no operation accesses memory. Idempotent."""
        if self._worker:
            self.library.ucp_worker_destroy(self._worker)
            self._worker = 0
        for memory in list(self._memories):
            self.unregister(memory)
        if self._context:
            self.library.ucp_cleanup(self._context)
            self._context = 0


def _init(library: Library, options: Mapping[str, str]) -> int:
    config = library.make("no configuration", library.ucp_config_read, None, None)
    try:
        for name, value in options.items():
            status = library.ucp_config_modify(config, name.encode(), value.encode())
            library.check(status, f"{name}={value} is refused")
        params = _Params(field_mask=1 | 1 << 5, features=_FEATURE_RMA | _FEATURE_WAKEUP, mt_workers_shared=1)
        return library.make("UCX cannot be used here", library.ucp_init_version, *OLDEST, byref(params), config)
    finally:
        library.ucp_config_release(config)


# Signals. The module `signal` would lose handlers of C code, such as faulthandler's.

_sigaction = ctypes.CDLL(None).sigaction
# struct sigaction is 152 bytes on Linux.
_SIGACTION_SIZE: Final = 256


def _signal_handlers() -> dict[int, ctypes.Array[c_char]]:
    handlers: dict[int, ctypes.Array[c_char]] = {}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler = ctypes.create_string_buffer(_SIGACTION_SIZE)
        if not _sigaction(int(number), None, handler):
            handlers[int(number)] = handler
    return handlers


def _set_signal_handlers(handlers: Mapping[int, ctypes.Array[c_char]]) -> None:
    for number, handler in handlers.items():
        _sigaction(number, handler, None)
