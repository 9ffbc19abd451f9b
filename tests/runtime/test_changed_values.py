"""The description of the objects to build is the producer's, also if buffers come over a connection of anybody."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoded import Encoded
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft.exceptions import SerializationError


class Plain:
    """Pickled as a whole: none of its parts is a buffer of its own."""

    def __init__(self, size: int) -> None:
        self.numbers = [str(number) for number in range(size)]


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def encoded(value: Any) -> tuple[Encoded, bytearray]:
    """A value and its only blob."""
    found = encode(value, names=Names("a value"))
    blob = found.packed()
    assert blob is not None
    return found, bytearray(blob)


VALUES: dict[str, Callable[[], Any]] = {
    "a long pickle": lambda: Plain(20_000),
    "many objects": lambda: [Plain(100) for _ in range(100)],
    "a long skeleton": lambda: [[str(number)] for number in range(9_000)],
    "a long list": lambda: list(range(30_000)),
    "a long dict": lambda: {number: str(number) for number in range(30_000)},
}


@pytest.mark.parametrize("kind", VALUES)
def test_one_bit_anywhere_in_what_builds_objects_is_noticed(kind: str) -> None:
    found, blob = encoded(VALUES[kind]())
    decode(found.payload, [memoryview(blob)])
    for index in range(0, len(blob), len(blob) // 50):
        changed = bytearray(blob)
        changed[index] ^= 1
        # Behind the end of the last buffer there is nothing to change.
        if any(
            offset <= index < offset + source.nbytes
            for source, offset in zip(found.sources, found.offsets, strict=True)
        ):
            with pytest.raises(SerializationError, match="it was changed on its way"):
                decode(found.payload, [memoryview(changed)])


@pytest.mark.parametrize("kind", VALUES)
def test_f87_a_pickle_that_is_put_in_the_place_of_a_value_does_not_run(kind: str, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "canary"))
    pickle.loads(bomb)
    (tmp_path / "canary").rmdir()
    found, blob = encoded(VALUES[kind]())
    for offset in found.offsets:
        changed = bytearray(blob)
        changed[offset : offset + len(bomb)] = bomb
        with pytest.raises(SerializationError, match="it was changed on its way"):
            decode(found.payload, [memoryview(changed)])
    assert not (tmp_path / "canary").exists()


def test_the_bytes_of_arrays_are_only_bytes() -> None:
    """They are not covered: a change there is a wrong number and nothing else."""
    array = np.arange(10_000.0)
    found, blob = encoded([array, "text"])
    blob[found.offsets[0]] ^= 1
    changed, text = decode(found.payload, [memoryview(blob)])
    assert text == "text"
    assert (changed[1:] == array[1:]).all()
    assert changed[0] != array[0]
