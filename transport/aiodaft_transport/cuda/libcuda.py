"""libcuda through ctypes: only the functions that move memory between processes, one Python call per driver call.

Every machine with a GPU has this library, and all frameworks share its primary contexts and streams. It is loaded, and
a context made, at the first use.

Source: the CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

from aiodaft_transport.cuda.device import IDENTITY_SIZE, Event, Export, Span
from aiodaft_transport.exceptions import DeviceError, OutOfDeviceMemory, Unreachable

_LIBRARY: Final = "libcuda.so.1"

_OK: Final = 0
_OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600
# Errors of opening memory if one GPU cannot reach the other: no peer access, mapping failed, too many peers.
_OUT_OF_REACH: Final = (217, 205, 711)

_STREAM_NON_BLOCKING: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_LAZY_PEER_ACCESS: Final = 1
_CAPTURE_RELAXED: Final = 2
_BUFFER_ID: Final = 7


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = [("data", c_char * 64)]


class _Identity(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("data", c_char * IDENTITY_SIZE)]


# All return a CUresult, and release the GIL: another thread may hold the driver's locks.
_FUNCTIONS: Final[dict[str, list[Any]]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDeviceGetUuid_v2": [POINTER(_Identity), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuIpcGetMemHandle": [POINTER(_Handle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), _Handle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
}


class _Apart:
    """Work of this thread meanwhile ends no capture of a graph in another thread."""

    __slots__ = ("_library", "_mode")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._mode = c_int(_CAPTURE_RELAXED)
        library.cuThreadExchangeStreamCaptureMode(byref(self._mode))

    def __enter__(self) -> None:
        """The work has begun already: this surrounds each call, and is kept short."""

    def __exit__(self, *exc_info: object) -> None:
        self._library.cuThreadExchangeStreamCaptureMode(byref(self._mode))


class _Current(_Apart):
    __slots__ = ()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._library.cuCtxPopCurrent_v2(byref(c_void_p()))


class CudaDriver:
    """The GPUs of this process.

    Raises:
        Unreachable: There is no driver, or no GPU that this process may use.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        self._library = _load(library)
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[int, int] = {}
        # Reentrant: a function that makes a stream may make a context first.
        self._lock = threading.RLock()
        self._check(self._library.cuInit(0), "CUDA cannot be used here", Unreachable)
        count = c_int()
        self._check(self._library.cuDeviceGetCount(byref(count)), "GPUs cannot be counted", Unreachable)
        if not count.value:
            raise Unreachable("this process sees no GPU (CUDA_VISIBLE_DEVICES limits the GPUs that it sees)")
        self._devices, self._identities = zip(*map(self._device, range(count.value)), strict=True)

    @property
    def identities(self) -> Sequence[bytes]:
        return self._identities

    def apart(self) -> _Apart:
        return _Apart(self._library)

    def memory(self, device: int) -> int:
        size = c_size_t()
        status = self._library.cuDeviceTotalMem_v2(byref(size), self._devices[device])
        self._check(status, f"the memory of GPU {device} cannot be measured")
        return size.value

    def allocate(self, device: int, nbytes: int) -> int:
        address = c_uint64()
        with self._on(device):
            status = self._library.cuMemAlloc_v2(byref(address), nbytes)
        kind = OutOfDeviceMemory if status == _OUT_OF_MEMORY else DeviceError
        self._check(status, f"{nbytes:,} bytes of GPU memory cannot be allocated for a value", kind)
        return address.value

    def free(self, device: int, address: int) -> None:
        with self._on(device):
            self._check(self._library.cuMemFree_v2(address), "GPU memory cannot be freed")

    def export(self, device: int, address: int) -> Export:
        base, size, handle, number = c_uint64(), c_size_t(), _Handle(), c_uint64()
        with self._on(device):
            status = self._library.cuMemGetAddressRange_v2(byref(base), byref(size), address)
            if status == _OK:
                status = self._library.cuIpcGetMemHandle(byref(handle), base)
            if status == _OK:
                status = self._library.cuPointerGetAttribute(byref(number), _BUFFER_ID, base)
        self._check(
            status,
            "other processes cannot open this GPU memory: neither memory of expandable segments nor that of another "
            "process can be lent (do not use borrow(): the value is then copied; for the former, "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False also helps)",
            Unreachable,
        )
        return Export(number.value, bytes(handle), base.value, size.value)

    def open(self, device: int, handle: bytes) -> int:
        address = c_uint64()
        if len(handle) != ctypes.sizeof(_Handle):
            raise DeviceError(f"a handle of GPU memory has {ctypes.sizeof(_Handle)} bytes, not {len(handle)}")
        with self._on(device):
            # This call enables peer access to the other GPU, which need not be visible here.
            status = self._library.cuIpcOpenMemHandle_v2(
                byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
        if status in _OUT_OF_REACH:
            self._check(status, f"GPU {device} of this process has no access to the GPU of the value", Unreachable)
        self._check(status, "GPU memory of the other process cannot be opened")
        return address.value

    def shut(self, device: int, address: int) -> None:
        with self._on(device):
            self._check(self._library.cuIpcCloseMemHandle(address), "GPU memory of a peer cannot be closed")

    def stream_apart(self, device: int) -> int:
        stream = self._streams.get(device)
        if stream is not None:
            return stream
        with self._lock:
            made = c_void_p()
            with self._on(device):
                status = self._library.cuStreamCreate(byref(made), _STREAM_NON_BLOCKING)
            self._check(status, "a stream cannot be created")
            return self._streams.setdefault(device, made.value or 0)

    def copy(self, device: int, spans: Sequence[Span], stream: int) -> Event:
        with self._on(device):
            for target, source, nbytes in spans:
                # Unified addresses identify their GPUs.
                self._check(self._library.cuMemcpyAsync(target, source, nbytes, stream), "GPU memory cannot be copied")
            return self._record(device, stream)

    def is_idle(self, device: int, stream: int) -> bool:
        with self._on(device):
            return bool(self._library.cuStreamQuery(stream) == _OK)

    def record(self, device: int, stream: int) -> Event:
        with self._on(device):
            return self._record(device, stream)

    def _record(self, device: int, stream: int) -> Event:
        event = c_void_p()
        self._check(self._library.cuEventCreate(byref(event), _EVENT_DISABLE_TIMING), "an event cannot be created")
        number = event.value or 0
        try:
            self._check(self._library.cuEventRecord(number, stream), "an event cannot be recorded")
        except BaseException:
            self._library.cuEventDestroy_v2(number)
            raise
        return Event(device, number)

    def happened(self, event: Event) -> bool:
        with self._on(event.device):
            status = self._library.cuEventQuery(event.number)
        if status == _NOT_READY:
            return False
        self._check(status, "the GPU failed in earlier work of the stream that copies a value")
        return True

    def wait(self, event: Event) -> None:
        with self._on(event.device):
            # `happened` reports a failure.
            self._library.cuEventSynchronize(event.number)

    def forget(self, event: Event) -> None:
        with self._on(event.device):
            self._library.cuEventDestroy_v2(event.number)

    def close(self) -> None:
        while self._streams:
            device, stream = self._streams.popitem()
            with self._on(device):
                self._library.cuStreamDestroy_v2(stream)
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for device in contexts:
            self._library.cuDevicePrimaryCtxRelease_v2(self._devices[device])

    def _on(self, device: int) -> _Current:
        context = self._context(device)
        self._check(self._library.cuCtxPushCurrent_v2(context), f"GPU {device} cannot be used")
        return _Current(self._library)

    def _context(self, device: int) -> c_void_p:
        context = self._contexts.get(device)
        if context is not None:
            return context
        with self._lock:
            context = self._contexts.get(device) or c_void_p()
            if not context:
                # Takes up to half a second for the first user of the device in this process.
                status = self._library.cuDevicePrimaryCtxRetain(byref(context), self._devices[device])
                self._check(status, f"GPU {device} cannot be used")
                self._contexts[device] = context
            return context

    def _device(self, index: int) -> tuple[int, bytes]:
        device, identity = c_int(), _Identity()
        self._check(self._library.cuDeviceGet(byref(device), index), f"GPU {index} cannot be used", Unreachable)
        status = self._library.cuDeviceGetUuid_v2(byref(identity), device)
        self._check(status, f"GPU {index} has no identity", Unreachable)
        return device.value, bytes(identity)

    def _check(self, status: int, what: str, kind: type[DeviceError | Unreachable] = DeviceError) -> None:
        if status == _OK:
            return
        text = c_char_p()
        self._library.cuGetErrorString(status, byref(text))
        raise kind(f"{what}: {(text.value or b'an unknown error').decode()} (CUDA error {status})")


def _load(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int
    except (OSError, AttributeError) as error:
        raise Unreachable(f"there is no usable NVIDIA driver: {error}") from error
    return library
