"""The format of checkpoints, which is that of safetensors with the index of transformers: where each byte lies. Pure.

A file has 8 bytes with the length of its header, the header in JSON, and its tensors, row by row, without gaps. The
index names the file of each tensor; beside that, it has a checksum of each part that one rank has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

from aiodaft._protocol.groups.reshard import Grid

INDEX: Final = "model.safetensors.index.json"
# A file without an index, as others write it.
SINGLE: Final = "model.safetensors"
# The most bytes of a file with several tensors, and of one access to a file.
_FILE: Final = 4 << 30
_CHUNK: Final = 16 << 20

_CODES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
_DTYPES: Final = {code: dtype for dtype, code in _CODES.items()}


def _itemsize(code: str) -> int:
    return 1 if code == "BOOL" else int(code.partition("_")[0].lstrip("BCFIU")) // 8


class Place(NamedTuple):
    """A tensor in a file, and its first byte there."""

    file: str
    offset: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def chunks(self, start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where the bytes of a part lie in the file, in the order of its elements: offsets and lengths."""
        # The last dimensions of which the part has all, and one before these, are one stretch.
        dim = len(size)
        while dim and (dim == len(size) or size[dim] == self.shape[dim]):
            dim -= 1
        steps = [prod(self.shape[at + 1 :]) * self.itemsize for at in range(len(size))]
        length = prod(size[dim:]) * self.itemsize
        first = self.offset + sum(at * step for at, step in zip(start, steps, strict=True))
        for outer in product(*(range(count) for count in size[:dim])) if length else ():
            begin = first + sum(at * step for at, step in zip(outer, steps, strict=False))
            for at in range(0, length, _CHUNK):
                yield begin + at, min(_CHUNK, length - at)


class Part(NamedTuple):
    """A part of a tensor that one rank has written, and the CRC-32 of its bytes."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    checksum: int

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has such a part."""
        return len(self.start) == len(self.size) == len(shape) and all(
            min(start, size) >= 0 and start + size <= length
            for start, size, length in zip(self.start, self.size, shape, strict=True)
        )


class File(NamedTuple):
    name: str
    header: bytes
    size: int


def lay_out_files(tensors: Mapping[str, Grid], limit: int = _FILE) -> tuple[list[File], dict[str, Place]]:
    """Place whole tensors in files.

    Raises:
        ValueError: A file cannot have such a tensor.
    """
    groups: list[dict[str, Grid]] = []
    room = 0
    # Those with larger elements come first: so each is aligned.
    for name, grid in sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0])):
        if grid.dtype not in _CODES or name == "__metadata__":
            raise ValueError(f"{name!r} of torch.{grid.dtype} cannot be saved: safetensors has no such tensor")
        if grid.nbytes > room or not groups:
            groups.append({})
            room = limit
        groups[-1][name] = grid
        room -= grid.nbytes
    files, places = list[File](), dict[str, Place]()
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, grid in group.items():
            begin, end = end, end + grid.nbytes
            header[name] = {"dtype": _CODES[grid.dtype], "shape": grid.shape, "data_offsets": (begin, end)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        files.append(File(file, len(text).to_bytes(8, "little") + text, start + end))
        for name, grid in group.items():
            places[name] = Place(file, start + header[name]["data_offsets"][0], grid.dtype, grid.itemsize, grid.shape)
    return files, places


def index_of(places: Mapping[str, Place], parts: Sequence[Part]) -> bytes:
    metadata = {"total_size": sum(place.nbytes for place in places.values()), "parts": parts}
    return json.dumps({"metadata": metadata, "weight_map": {n: p.file for n, p in sorted(places.items())}}).encode()


def read_index(text: bytes) -> tuple[dict[str, str], list[Part]]:
    """The file of each tensor, and the parts with checksums, of which an index of others has none.

    Raises:
        ValueError: It is no index.
    """
    try:
        index = json.loads(text)
        parts = [
            Part(name, tuple(map(int, start)), tuple(map(int, size)), sum_)
            for name, start, size, sum_ in _parts_of(index)
        ]
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is half or corrupted: {error!r}") from error
    if any("/" in file for file in files.values()):
        raise ValueError(f"{INDEX} names a file in another folder")
    return files, parts


def _parts_of(index: Any) -> Any:
    return index.get("metadata", {}).get("parts", ())


def header_length(file: str, first: bytes, size: int) -> int:
    """The length of the header of a file that begins with these 8 bytes.

    Raises:
        ValueError: The file is shorter.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or 8 + length > size:
        raise ValueError(f"{file} is half or corrupted: it has {size} bytes, and its header is longer")
    return length


def read_header(file: str, text: bytes, size: int) -> dict[str, Place]:
    """The tensors of a file of this size.

    Raises:
        ValueError: It is no header, or the tensors do not fill the file.
    """
    start, end = 8 + len(text), 8 + len(text)
    places: dict[str, Place] = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            code, shape, (begin, stop) = one["dtype"], tuple(map(int, one["shape"])), one["data_offsets"]
            places[name] = Place(file, start + begin, _DTYPES[code], _itemsize(code), shape)
            if start + begin != end or stop - begin != places[name].nbytes:
                raise ValueError(f"the bytes of {name!r} are not where they should be")
            end = start + stop
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is half or corrupted: its header is wrong: {error!r}") from error
    if end != size:
        raise ValueError(f"{file} is half or corrupted: it has {size} bytes, and by its header {end}")
    return places
