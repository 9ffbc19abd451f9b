"""A checkpoint is whole or absent, wherever the process that saves it is killed; damaged ones are refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodaft._protocol.groups.reshard import Grid, Piece, plan
from aiodaft._protocol.groups.safetensors import INDEX, File, Part, Place, lay_out_files
from aiodaft._runtime.groups.checkpoints import Draft, look, read, verify, write

# Two ranks have the rows of "w", the second one also "n".
WHOLE = {"w": torch.arange(40.0).view(8, 5), "n": torch.arange(3)}
SHARDS = [{"w": WHOLE["w"][:5]}, {"w": WHOLE["w"][5:], "n": WHOLE["n"]}]
PARTED = {
    "w": Grid("float32", 4, ((0, 5, 8), (0, 5)), ((0, 0), (1, 0))),
    "n": Grid("int64", 8, ((0, 3),), (None, (0,))),
}
FULL = {
    "w": Grid("float32", 4, ((0, 8), (0, 5)), ((0, 0),)),
    "n": Grid("int64", 8, ((0, 3),), ((0,),)),
}


def save(path: Path) -> None:
    """All steps of all ranks, one after the other."""
    files, places = lay_out_files(PARTED, limit=100)
    draft = Draft(str(path))
    try:
        draft.begin(files)
        parts = written(draft, places)
        draft.finish(places, parts)
    finally:
        draft.end()


def written(draft: Draft, places: dict[str, Place]) -> list[Part]:
    pieces = plan(PARTED, FULL, [None]).sent[0]
    return [
        part
        for rank, shard in enumerate(SHARDS)
        for part in write(draft.folder, places, shard, [piece for piece in pieces if piece.source == rank])
    ]


def loaded(path: Path) -> dict[str, Tensor]:
    places, parts = look(str(path))
    verify(str(path), places, parts)
    tensors = {name: torch.empty_like(one) for name, one in WHOLE.items()}
    whole = [Piece(name, 0, (0,) * one.dim(), (0,) * one.dim(), tuple(one.shape), 0, 0) for name, one in WHOLE.items()]
    read(str(path), places, tensors, whole)
    return tensors


def is_whole(path: Path) -> bool:
    found = loaded(path)
    return all(torch.equal(found[name], one) for name, one in WHOLE.items())


class Counter:
    """Counts the calls that a function makes, those of C functions too; `at`: kills the process at that one."""

    def __init__(self, at: int = -1) -> None:
        self.count = 0
        self._at = at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in {"call", "c_call", "c_return"}:
            self.count += 1
            if self.count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def run(self, function: Callable[[], object]) -> int:
        sys.setprofile(self)
        try:
            function()
        finally:
            sys.setprofile(None)
        return self.count


def end_of_child(function: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("points", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_after_a_kill_at_any_instant_the_checkpoint_is_whole_or_absent(in_memory: Path, points: int) -> None:
    save(in_memory / "warm")
    alone = in_memory / "alone" / "checkpoint"
    total = Counter().run(partial(save, alone))
    assert total > 200
    outcomes: list[bool] = []
    for point in range(points):
        folder = in_memory / str(point)
        path = folder / "checkpoint"
        counter = Counter(at=1 + point * (total - 1) // (points - 1))
        assert end_of_child(partial(counter.run, partial(save, path))) == -signal.SIGKILL
        outcomes.append(path.exists())
        if path.exists():
            assert is_whole(path)
        else:
            # The next one goes on from what is left, and leaves nothing of it.
            save(path)
            assert is_whole(path)
            assert [one.name for one in folder.iterdir()] == ["checkpoint"]
    # Absent until it has its name, whole from then on.
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {False, True}


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose files are synced at once."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def rename_tensor(path: Path) -> None:
    index = json.loads(path.read_text())
    index["weight_map"]["other"] = index["weight_map"]["w"]
    path.write_text(json.dumps(index))


def with_part(index: int, value: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["metadata"]["parts"][0][index] = value
        path.write_text(json.dumps(content))

    return change


FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


@pytest.mark.parametrize(
    ("file", "damage", "error"),
    [
        (SECOND, shorten, f"{SECOND} is half or corrupted: it has"),
        (FIRST, lambda path: os.truncate(path, 20), f"{FIRST} is half or corrupted: it has 20 bytes"),
        (FIRST, lambda path: os.truncate(path, 0), f"{FIRST} is half or corrupted: it has 0 bytes"),
        (SECOND, Path.unlink, f"is half: it has no {SECOND}, which the index names"),
        (SECOND, flip, f"is corrupted: {SECOND} has other bytes of 'w' than were saved"),
        (FIRST, flip, f"is corrupted: {FIRST} has other bytes of 'n' than were saved"),
        (INDEX, shorten, f"{INDEX} is half or corrupted"),
        (INDEX, with_part(0, "other"), f"{INDEX} has a checksum of a part of 'other' that is nowhere"),
        (INDEX, with_part(1, [8, 0]), f"{INDEX} has a checksum of a part of 'w' that is nowhere"),
        (INDEX, with_part(2, [1]), f"{INDEX} has a checksum of a part of 'w' that is nowhere"),
        (INDEX, lambda path: path.write_text('{"weight_map": {"w": ".."}}'), r"it has no \.\., which the index"),
        (INDEX, rename_tensor, f"{SECOND} has no 'other', which the index expects there"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_in_words(
    tmp_path: Path, file: str, damage: Callable[[Path], object], error: str
) -> None:
    save(tmp_path / "one")
    assert is_whole(tmp_path / "one")
    damage(tmp_path / "one" / file)
    with pytest.raises(ValueError, match=error):
        loaded(tmp_path / "one")


def test_a_folder_without_one_is_named_and_what_exists_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no checkpoint: there is no {INDEX} in it"):
        look(str(tmp_path))
    with pytest.raises(FileExistsError, match="save each checkpoint to a path of its own"):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_two_saves_to_one_path_do_not_take_each_others_files(tmp_path: Path) -> None:
    path, (files, places) = tmp_path / "one", lay_out_files(PARTED, limit=100)
    first, second, third = (Draft(str(path)) for _ in range(3))
    first.begin(files)
    with pytest.raises(FileExistsError, match=f"another save to {path} goes on: save each checkpoint to a path of"):
        second.begin(files)
    second.end()
    first.finish(places, written(first, places))
    first.end()
    assert is_whole(path)
    # Two that have begun at the same instant: the first one that ends has the name.
    path.rename(tmp_path / "other")
    third.begin(files)
    (tmp_path / "other").rename(path)
    parts = written(third, places)
    with pytest.raises(FileExistsError, match="one exists: save each checkpoint to a path of its own"):
        third.finish(places, parts)
    third.end()
    assert is_whole(path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_save_that_cannot_make_its_files_leaves_nothing(tmp_path: Path) -> None:
    draft = Draft(str(tmp_path / "one"))
    with pytest.raises(FileNotFoundError):
        draft.begin([File("a", b"", 1), File("no folder/b", b"", 1)])
    draft.end()
    assert [*tmp_path.iterdir()] == []


def test_others_read_the_files_and_theirs_are_read(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    save(tmp_path / "ours")
    found = package.load_file(tmp_path / "ours" / FIRST) | package.load_file(tmp_path / "ours" / SECOND)
    assert found.keys() == WHOLE.keys()
    assert all(torch.equal(found[name], one) for name, one in WHOLE.items())
    (tmp_path / "theirs").mkdir()
    package.save_file(WHOLE, tmp_path / "theirs" / "model.safetensors")
    assert is_whole(tmp_path / "theirs")
