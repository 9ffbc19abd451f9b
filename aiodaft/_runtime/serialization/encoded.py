"""Encoded values: a small skeleton and large buffers, which are copied only when their target is known; and tensors.

The buffers of one value are packed into one *blob* (64-byte aligned), so that 200 tensors are one transfer. A buffer in
memory that other processes can read (`aiodaft.memory.empty`, `aiodaft.memory.register`) is a separate blob and is never
copied.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, cast

from aiodaft._runtime.process import Process
from aiodaft.exceptions import BorrowError
from aiodaft_transport import Block, Pullable
from aiodaft_transport.memory import address_of, copy_memory, view_at

if TYPE_CHECKING:
    import torch


# The blobs of a value: one of the host, one for each buffer that is apart, and one of each accelerator.

_ALIGNMENT: Final = 64
APART: Final = -1


class Buffer(Protocol):
    """One buffer of a value, on an accelerator if `device` is not None."""

    nbytes: int
    device: int | None

    @property
    def is_apart(self) -> bool: ...


def lay_out(buffers: Iterable[Buffer]) -> tuple[list[int], int, dict[int, int]]:
    """Offsets of the buffers in their blobs, and the sizes of these: the host's, and that of each accelerator."""
    offsets: list[int] = []
    ends: dict[int | None, int] = {}
    for buffer in buffers:
        if buffer.is_apart:
            offsets.append(APART)
            continue
        offsets.append(-(-ends.get(buffer.device, 0) // _ALIGNMENT) * _ALIGNMENT)
        ends[buffer.device] = offsets[-1] + buffer.nbytes
    return offsets, ends.pop(None, 0), {device: end for device, end in ends.items() if device is not None}


def blob_table(buffers: Sequence[Buffer], offsets: list[int], nbytes: int) -> list[list[int]]:
    numbers = count(1 if nbytes else 0)
    apart = [next(numbers) if buffer.is_apart else 0 for buffer in buffers]
    of_devices: dict[int, int] = {}
    table: list[list[int]] = []
    for buffer, offset, blob in zip(buffers, offsets, apart, strict=True):
        if not buffer.is_apart and buffer.device is not None:
            if buffer.device not in of_devices:
                of_devices[buffer.device] = next(numbers)
            blob = of_devices[buffer.device]
        table.append([blob, max(offset, 0), buffer.nbytes])
    return table


def digest_of(code: bytes | memoryview) -> bytes:
    import hashlib  # noqa: PLC0415 - slow, and most programs send no code

    return hashlib.sha256(code).digest()


class Source:
    __slots__ = ("address", "block", "device", "fill", "frozen", "keep", "lent", "nbytes", "origin", "version")

    def __init__(self, nbytes: int, address: int, keep: Any, device: int | None = None) -> None:
        self.nbytes = nbytes
        self.address = address
        self.device = device
        self.keep = keep
        # For memory that is not contiguous: writes the content to an address.
        self.fill: Callable[[int], None] | None = None
        # Gives the number of writes to a tensor, as torch counts them; None if torch does not.
        self.version: Callable[[], int | None] | None = None
        # Gives the object that the buffer was made from, while it lives and was not written to.
        self.origin: Callable[[], Any] | None = None
        # Nothing can change it: bytes, or memory of the encoder's own.
        self.frozen = False
        self.block: Pullable | None = None
        self.lent = False

    @property
    def is_apart(self) -> bool:
        return self.block is not None or (self.lent and self.device is not None)

    @classmethod
    def of(cls, buffer: Any) -> Source:
        view = memoryview(buffer)
        return cls(view.nbytes, address_of(view), view)

    def write_to(self, address: int) -> None:
        if self.fill is not None:
            self.fill(address)
        else:
            copy_memory(address, self.address, self.nbytes)


@dataclass(slots=True)
class Encoded:
    """A value, ready to travel.

    Attributes:
        payload: The skeleton; a few bytes if the skeleton itself is one of the sources.
        offsets: The offset of each source in the blob, or `APART`.
        slots: Refs that the receiver replaces by their values.
    """

    payload: bytes
    sources: list[Source] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    device_nbytes: dict[int, int] = field(default_factory=dict)
    slots: list[Any] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return any(source.device is not None for source in self.sources)

    @property
    def size(self) -> int:
        return len(self.payload) + sum(source.nbytes for source in self.sources)

    @property
    def is_apart(self) -> bool:
        return any(source.is_apart for source in self.sources)

    @property
    def lent(self) -> bool:
        return any(source.lent for source in self.sources)

    @property
    def is_frozen(self) -> bool:
        return all(source.frozen or source.device is not None or source.is_apart for source in self.sources)

    def write_to(self, address: int) -> None:
        for source, offset in zip(self.sources, self.offsets, strict=True):
            if offset >= 0 and source.device is None:
                source.write_to(address + offset)

    def packed(self) -> bytes | None:
        if not self.nbytes:
            return None
        blob = bytearray(self.nbytes)
        self.write_to(address_of(blob))
        return bytes(blob)

    def versions(self) -> list[int | None]:
        return [source.version() if source.version is not None else None for source in self.sources]

    def check_unchanged(self, before: list[int | None]) -> None:
        if self.versions() != before:
            raise BorrowError(
                "a tensor was written to while aiodaft was reading it: pass or return x.clone(), "
                "or wait for `await ref.ready()` before you write to it"
            )


# Tensors: every dtype, any strides; views of one storage stay views of one storage.
#
# torch is imported only when a tensor is received. Its own pickling cannot load several dtypes (fp8, unsigned,
# complex32), so a tensor is encoded as (dtype, size, strides) and a span of the bytes of its storage.

# buffer, dtype, size, stride, first byte in the buffer, flags, device
Spec: TypeAlias = list[Any]

_REQUIRES_GRAD: Final = 1
_PARAMETER: Final = 2
# Views of one storage travel as one span, up to this many times the bytes that they cover.
_SPAN_SLACK: Final = 2


def loaded_torch() -> ModuleType | None:
    torch = sys.modules.get("torch")
    return None if torch is None or getattr(torch.__spec__, "_initializing", False) else torch


def is_dense_tensor(value: Any) -> bool:
    """This module encodes strided tensors and parameters, no sparse tensors or other subclasses."""
    torch = loaded_torch()
    if torch is None:
        return False
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided


def nowhere(_: Any) -> None: ...


class Places(NamedTuple):
    """The tensors that other processes can read in place, or on the same accelerator.

    Attributes:
        find_block: Finds the block of memory that other processes can read in place.
        find_device: Finds the accelerator of a tensor; None if the tensor travels through memory of the host.
        lend: Whether memory of an accelerator is read in place, not copied.
        home: The process that encodes.
    """

    find_block: Callable[[Source], Block | None] = nowhere
    find_device: Callable[[torch.Tensor], int | None] = nowhere
    lend: bool = False
    home: Process | None = None

    def put(self, source: Source) -> None:
        if source.device is not None:
            source.lent = self.lend
        elif source.nbytes:
            source.block = self.find_block(source)
            source.lent = source.block is not None


def whole_tensor(tensor: torch.Tensor, places: Places) -> tuple[Source, Spec] | None:
    """The memory and the spec of a dense tensor without gaps, of the host or an accelerator; None for any other one."""
    address, device = tensor.data_ptr(), places.find_device(tensor)
    if (
        not (address and (tensor.is_cpu or device is not None) and tensor.is_contiguous())
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    # Not the tensor, which may get other memory.
    source = Source(tensor.nbytes, address, tensor.untyped_storage(), device)
    places.put(source)
    source.version = _version_counter(tensor)
    source.origin = _origin(tensor)
    return source, _spec(0, tensor, tensor.stride(), 0, tensor)


def _spec(buffer: int, tensor: torch.Tensor, stride: Sequence[int], start: int, original: torch.Tensor) -> Spec:
    torch = loaded_torch()
    assert torch is not None
    flags = original.requires_grad * _REQUIRES_GRAD + (type(original) is torch.nn.Parameter) * _PARAMETER
    dtype = str(tensor.dtype).removeprefix("torch.")
    device = "" if original.is_cpu else original.device.type
    return [buffer, dtype, list(tensor.shape), list(stride), start, flags, device]


class TensorTable:
    def __init__(self, places: Places) -> None:
        self._places = places
        self._indices: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        self._devices: list[int | None] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor in and return its number. A tensor seen before keeps its number.

        Raises:
            TypeError: A kind of tensor that cannot travel.
        """
        index = self._indices.get(id(tensor))
        if index is None:
            if tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
                kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "meta"
                raise TypeError(f"a {kind} tensor cannot travel; convert it to a plain tensor first")
            if tensor.numel() and not tensor.data_ptr():
                raise TypeError("the memory of this tensor was freed")
            plain = tensor.detach().resolve_conj().resolve_neg()
            index = self._indices[id(tensor)] = len(self._tensors)
            self._originals.append(tensor)
            device = self._places.find_device(plain)
            self._devices.append(device)
            self._tensors.append(plain if device is not None or plain.device.type == "cpu" else plain.cpu())
        return index

    def finish(self, sources: list[Source]) -> list[Spec]:
        specs: dict[int, Spec] = {}
        for members in self._by_storage():
            for group in _groups(members):
                self._finish_group(group, sources, specs)
        return [specs[index] for index in range(len(self._tensors))]

    def _by_storage(self) -> list[list[tuple[int, torch.Tensor]]]:
        storages: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(self._tensors):
            storages.setdefault(_storage_key(tensor, index), []).append((index, tensor))
        return list(storages.values())

    def _finish_group(
        self, group: list[tuple[int, torch.Tensor]], sources: list[Source], specs: dict[int, Spec]
    ) -> None:
        extents = [_extent(tensor) for _, tensor in group]
        low, high = min(extents)[0], max(high for _, high in extents)
        first_index, first = group[0]
        compact = len(group) == 1 and high - low > first.numel() * first.element_size()
        # Empty memory is on no device.
        device = self._devices[first_index] if high > low else None
        if compact:
            source = _strided_source(first) if device is None else _gathered_source(first, device)
        else:
            source = Source(high - low, first.untyped_storage().data_ptr() + low if high > low else 0, first, device)
            self._places.put(source)
        original = self._originals[first_index]
        source.version = _version_counter(original)
        if len(group) == 1:
            source.origin = _origin(original)
        for (index, tensor), (start, _) in zip(group, extents, strict=True):
            stride = _contiguous_stride(tensor.shape) if compact else tensor.stride()
            first_byte = 0 if compact else start - low
            specs[index] = _spec(len(sources), tensor, stride, first_byte, self._originals[index])
        sources.append(source)


class TensorMaker:
    """Rebuilds the tensors of one value; each is made once, so identity within the value is kept."""

    def __init__(self, specs: list[Spec], buffer: Callable[[int], Any], origin: Callable[[int], Any]) -> None:
        self._specs = specs
        self._buffer = buffer
        self._origin = origin
        self._bases: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def make(self, index: int) -> torch.Tensor:
        if index not in self._made:
            self._made[index] = self._build(index)
        return self._made[index]

    def _build(self, index: int) -> torch.Tensor:
        spec = self._specs[index]
        buffer = spec[0]
        original: torch.Tensor | None = self._origin(buffer)
        if original is not None:
            return original
        if buffer not in self._bases:
            self._bases[buffer] = as_bytes(self._buffer(buffer))
        return tensor_in(self._bases[buffer], spec)


def as_bytes(memory: Any) -> torch.Tensor:
    import torch  # noqa: PLC0415 - optional package

    if isinstance(memory, memoryview):
        memory = torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)
    return cast("torch.Tensor", memory)


def tensor_in(memory: torch.Tensor, spec: Spec) -> torch.Tensor:
    import torch  # noqa: PLC0415 - optional package

    _, dtype_name, size, stride, start, flags, device = spec
    dtype = getattr(torch, dtype_name)
    nbytes = memory.numel()
    if not nbytes:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    else:
        end = start + _span(size, stride) * dtype.itemsize
        if end - start != nbytes:
            memory = memory[start:end]
        # Also of the same type: other tensors of this storage are other objects.
        tensor = memory.view(dtype)
        if stride != [1]:
            tensor = tensor.as_strided(size, stride)
    # It came through host memory, and stays there in a process without such a device.
    if device and tensor.device.type != device and getattr(torch, device).is_available():
        tensor = tensor.to(device)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor


def fills_its_span(tensor: torch.Tensor) -> bool:
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != step and tensor.numel():
                return False
            step *= length
    return True


def same_strides(size: Any, first: Any, second: Any) -> bool:
    return all(length == 1 or one == two for length, one, two in zip(size, first, second, strict=True))


def memory_of(tensor: torch.Tensor) -> memoryview:
    return view_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _storage_key(tensor: torch.Tensor, index: int) -> tuple[str, int]:
    pointer = tensor.untyped_storage().data_ptr()
    return ("storage", pointer) if pointer else ("empty", index)


def _groups(members: list[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    if len(members) == 1:
        return [members]
    extents = [_extent(tensor) for _, tensor in members]
    span = max(high for _, high in extents) - min(low for low, _ in extents)
    covered = sum(high - low for low, high in extents)
    if span <= _SPAN_SLACK * covered:
        return [members]
    groups: list[list[tuple[int, torch.Tensor]]] = []
    end = -1
    for (low, high), member in sorted(zip(extents, members, strict=True), key=lambda pair: pair[0]):
        if low < end:
            groups[-1].append(member)
        else:
            groups.append([member])
        end = max(end, high)
    return groups


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    itemsize = tensor.element_size()
    low = int(tensor.storage_offset()) * itemsize
    # The usual case is the cheap one.
    span = tensor.numel() if tensor.is_contiguous() else _span(tensor.shape, tensor.stride())
    return low, low + span * itemsize


def _span(size: Any, stride: Any) -> int:
    if 0 in size:
        return 0
    return 1 + sum((int(length) - 1) * int(step) for length, step in zip(size, stride, strict=True))


def _contiguous_stride(size: Any) -> list[int]:
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return strides[::-1]


def _strided_source(tensor: torch.Tensor) -> Source:
    source = Source(tensor.numel() * tensor.element_size(), 0, tensor)

    def fill(address: int) -> None:
        torch = loaded_torch()
        assert torch is not None
        plain = _copyable(tensor)
        target = (ctypes.c_char * source.nbytes).from_address(address)
        torch.frombuffer(target, dtype=plain.dtype).view(plain.shape).copy_(plain)

    source.fill = fill
    return source


def _gathered_source(tensor: torch.Tensor, device: int) -> Source:
    """Memory of an accelerator's tensor with gaps: the accelerator copies it to a tensor without gaps."""
    gathered = _copyable(tensor).contiguous()
    return Source(gathered.numel() * gathered.element_size(), gathered.data_ptr(), gathered, device)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    torch = loaded_torch()
    assert torch is not None
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.view(carrier[tensor.element_size()])


def _version_counter(tensor: torch.Tensor) -> Callable[[], int | None]:
    # Tensors made under inference_mode count no versions.
    return (lambda: None) if tensor.is_inference() else lambda: tensor._version


def _origin(tensor: torch.Tensor) -> Callable[[], Any]:
    reference = weakref.ref(tensor)
    expected = None if tensor.is_inference() else tensor._version

    def origin() -> Any:
        alive = reference()
        return alive if alive is not None and expected is not None and alive._version == expected else None

    return origin


def kind_in(spec: Spec) -> str:
    _, dtype, size, *_ = spec
    return f"{dtype}{size}"


def kind_of(value: Any) -> str:
    """The kind of a value, for people: the type, or the dtype and the shape of a tensor or array. Never raises."""
    try:
        shape, dtype = value.shape, value.dtype
    except Exception:  # noqa: BLE001 - a user's property may raise anything
        shape = dtype = None
    if isinstance(shape, tuple) and dtype is not None:
        return f"{str(dtype).rpartition('.')[2]}{[*shape]}"
    return type(value).__name__


def nbytes_of(value: Any) -> int | None:
    if isinstance(value, bytes | bytearray):
        return len(value)
    try:
        size = value.nbytes
    except Exception:  # noqa: BLE001 - as above
        return None
    return size if isinstance(size, int) else None
