"""The bytes of files of safetensors: those of the package of this name, and the parts of tensors in them."""

from __future__ import annotations

import json
from itertools import pairwise, product

import pytest

from aiodaft._protocol.groups.reshard import Grid
from aiodaft._protocol.groups.safetensors import (
    File,
    Part,
    Place,
    header_length,
    index_of,
    lay_out_files,
    read_header,
    read_index,
)


def grid(shape: tuple[int, ...], dtype: str = "float32", itemsize: int = 4) -> Grid:
    return Grid(dtype, itemsize, tuple((0, length) for length in shape), ((0,) * len(shape),))


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (3, 1, 2), (2, 0)])
def test_the_chunks_of_a_part_are_its_elements_row_by_row(shape: tuple[int, ...]) -> None:
    place = Place("file", 100, "int16", 2, shape)
    elements = list(product(*map(range, shape)))
    ranges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for box in product(*ranges):
        inside = [at for at, one in enumerate(elements) if all(a <= x < b for x, (a, b) in zip(one, box, strict=True))]
        chunks = list(place.chunks([a for a, _ in box], [b - a for a, b in box]))
        assert [at for offset, length in chunks for at in range(offset, offset + length, 2)] == [
            100 + 2 * at for at in inside
        ]
        # What has no gaps is one access.
        gaps = sum(after != before + 1 for before, after in pairwise(inside))
        assert len(chunks) == (gaps + 1 if inside else 0)


def test_a_file_has_its_tensors_one_after_the_other_and_the_package_reads_it() -> None:
    tensors = {"b": grid((2, 3)), "a": grid((4,), "int64", 8), "c": grid((3,), "bool", 1), "none": grid((0, 2))}
    [file], places = lay_out_files(tensors)
    assert len(file.header) % 8 == 0
    assert file.size == len(file.header) + sum(one.nbytes for one in tensors.values())
    assert [one.offset - len(file.header) for one in (places["a"], places["b"], places["c"])] == [0, 32, 56]
    length = header_length(file.name, file.header[:8], file.size)
    assert read_header(file.name, file.header[8 : 8 + length], file.size) == places
    package = pytest.importorskip("safetensors")
    found = dict(package.deserialize(file.header + bytes(file.size - len(file.header))))
    assert {name: (one["dtype"], one["shape"]) for name, one in found.items()} == {
        "a": ("I64", [4]), "b": ("F32", [2, 3]), "c": ("BOOL", [3]), "none": ("F32", [0, 2])
    }  # fmt: skip


def test_tensors_are_shared_out_to_files_of_a_size() -> None:
    files, places = lay_out_files({name: grid((8,)) for name in "abcde"}, limit=70)
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert {name: place.file[10] for name, place in places.items()} == dict(zip("abcde", "11223", strict=True))


SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip


@pytest.mark.parametrize("dtype", SIZES)
def test_each_dtype_comes_back_with_its_size(dtype: str) -> None:
    [file], places = lay_out_files({"x": grid((3,), dtype, SIZES[dtype])})
    assert read_header(file.name, file.header[8:], file.size) == places
    assert places["x"].nbytes == 3 * SIZES[dtype]


def test_a_tensor_that_the_format_has_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'z' of torch.complex128 cannot be saved"):
        lay_out_files({"a": grid((2,)), "z": grid((2,), "complex128", 16)})


def broken(file: File) -> dict[str, tuple[bytes, int]]:
    header = json.loads(file.header[8:])
    gap = json.dumps(header | {"b": header["b"] | {"data_offsets": [17, 41]}}).encode()
    kind = json.dumps(header | {"b": header["b"] | {"dtype": "F99"}}).encode()
    text = file.header[8:]
    return {
        "half": (text, file.size - 1),
        "longer": (text, file.size + 1),
        "no JSON": (text[: len(text) // 2], file.size),
        "a list": (b"[]", file.size),
        "a gap": (gap, 8 + len(gap) + 41),
        "no dtype": (kind, 8 + len(kind) + 40),
    }


@pytest.mark.parametrize("fault", ["half", "longer", "no JSON", "a list", "a gap", "no dtype"])
def test_a_header_that_does_not_fit_its_file_is_refused(fault: str) -> None:
    [file], _ = lay_out_files({"a": grid((4,)), "b": grid((2, 3))})
    text, size = broken(file)[fault]
    with pytest.raises(ValueError, match=r"model-00001-of-00001.safetensors is half or corrupted"):
        read_header(file.name, text, size)


def test_a_file_that_ends_in_its_header_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 40 bytes, and its header is longer"):
        header_length("x", (33).to_bytes(8, "little"), 40)
    with pytest.raises(ValueError, match="it has 3 bytes"):
        header_length("x", b"abc", 3)


def test_an_index_names_files_and_checksums_and_a_half_one_is_refused() -> None:
    _, places = lay_out_files({"a": grid((4,)), "b": grid((2, 3))})
    parts = [Part("a", (0,), (4,), 7), Part("b", (0, 1), (2, 2), 8)]
    text = index_of(places, parts)
    assert read_index(text) == ({name: place.file for name, place in places.items()}, parts)
    assert json.loads(text)["metadata"]["total_size"] == 40
    # As transformers writes it.
    assert read_index(b'{"metadata": {"total_size": 8}, "weight_map": {"w": "f"}}') == ({"w": "f"}, [])
    for wrong in (text[:-9], b"", b"[]", b'{"weight_map": []}', b"\xff"):
        with pytest.raises(ValueError, match=r"model.safetensors.index.json is half or corrupted"):
            read_index(wrong)
    with pytest.raises(ValueError, match="another folder"):
        read_index(b'{"weight_map": {"w": "../f"}}')
