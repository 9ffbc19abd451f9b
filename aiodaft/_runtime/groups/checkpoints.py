"""Writes sharded states to files, and reads them: an actor in every process.

    controller -- save --> the first rank -- write --> each rank
                           (makes the folder, renames it)

The files are in a folder beside the one that is asked for. Each rank writes its parts to their places in the files, and
syncs these; then the folder gets its index and its name, in one step: a reader finds all of it or nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast
from zlib import crc32

from aiodaft._protocol.groups.reshard import Piece
from aiodaft._protocol.groups.safetensors import (
    INDEX,
    SINGLE,
    File,
    Part,
    Place,
    header_length,
    index_of,
    read_header,
    read_index,
)
from aiodaft._protocol.ids import CHECKPOINTS, PeerId
from aiodaft._runtime.calls.call import Caller
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.resharding import Expected, Resharding, Source, source_part
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft._runtime.serialization.encoded import memory_of
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.methods import method
from aiodaft.reading import borrow

if TYPE_CHECKING:
    import torch

# The tensors of a checkpoint, and the parts that have checksums.
Contents: TypeAlias = tuple[dict[str, Place], list[Part]]


class Draft:
    """The files of a save in a folder that has another name yet. The lock of its index says that the save goes on."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.folder = f"{self.path}.partial-{os.urandom(8).hex()}"
        self._index: BinaryIO | None = None

    def begin(self, files: Iterable[File]) -> None:
        """Make the files of a checkpoint, without their tensors.

        Raises:
            FileExistsError: There is something at the path, or another save to it goes on.
            OSError: The system refuses it.
        """
        if os.path.lexists(self.path):
            raise self._exists()
        parent, name = os.path.split(self.path)
        os.makedirs(parent, exist_ok=True)
        for old in os.listdir(parent):
            if old.startswith(f"{name}.partial-"):
                self._discard_if_killed(os.path.join(parent, old))
        os.mkdir(self.folder)
        self._index = open(os.path.join(self.folder, INDEX), "xb")  # noqa: SIM115 - it is open until the end
        if not _has_lock(self._index.fileno()):
            raise self._goes_on()
        for file in files:
            with open(os.path.join(self.folder, file.name), "xb") as made:
                made.write(file.header)
                made.truncate(file.size)

    def _discard_if_killed(self, folder: str) -> None:
        try:
            index = os.open(os.path.join(folder, INDEX), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            discard(folder)
            return
        try:
            if not _has_lock(index):
                raise self._goes_on()
            discard(folder)
        finally:
            os.close(index)

    def finish(self, places: Mapping[str, Place], parts: Sequence[Part]) -> None:
        """Give a checkpoint its index and its name."""
        with open(os.path.join(self.folder, INDEX), "r+b") as index:
            index.write(index_of(places, parts))
        with Files(self.folder, os.O_RDONLY) as files:
            for file in {INDEX, *(place.file for place in places.values())}:
                files[file]
            files.sync()
        _sync_folder(self.folder)
        try:
            os.rename(self.folder, self.path)
        except OSError as error:
            raise self._exists() if os.path.lexists(self.path) else error from None
        _sync_folder(os.path.dirname(self.path))

    def end(self) -> None:
        """Remove what has not got its name."""
        discard(self.folder)
        if self._index is not None:
            self._index.close()

    def _exists(self) -> FileExistsError:
        return FileExistsError(
            f"{self.path} exists: save each checkpoint to a path of its own, or remove that one first"
        )

    def _goes_on(self) -> FileExistsError:
        return FileExistsError(f"another save to {self.path} goes on: save each checkpoint to a path of its own")


def _has_lock(file: int) -> bool:
    """Lock a file, unless another one has."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # The file system has no locks.
    return True


def write(
    folder: str, places: Mapping[str, Place], shard: Mapping[str, torch.Tensor], pieces: Iterable[Piece]
) -> list[Part]:
    """Write parts of tensors to their places, so that they outlive the system."""
    parts: list[Part] = []
    with Files(folder, os.O_WRONLY) as files:
        for piece in pieces:
            place = places[piece.name]
            memory = memory_of(source_part(shard, piece).cpu().resolve_conj().resolve_neg().contiguous())
            done = 0
            for offset, length in place.chunks(piece.target_start, piece.size):
                _write(files[place.file], memory[done : done + length], offset)
                done += length
            parts.append(Part(piece.name, piece.target_start, piece.size, crc32(memory)))
        files.sync()
    return parts


def discard(folder: str) -> None:
    with suppress(OSError):
        for file in os.listdir(folder):
            os.unlink(os.path.join(folder, file))
        os.rmdir(folder)


def look(path: str) -> Contents:
    """The tensors of a checkpoint.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is half or corrupted.
    """
    try:
        with open(os.path.join(path, INDEX), "rb") as index:
            files, parts = read_index(index.read())
    except FileNotFoundError:
        if not os.path.exists(os.path.join(path, SINGLE)):
            raise FileNotFoundError(f"{path} has no checkpoint: there is no {INDEX} in it") from None
        return _look_into(path, SINGLE), []
    places: dict[str, Place] = {}
    for file in sorted(set(files.values())):
        places |= _look_into(path, file)
    for name, file in files.items():
        if name not in places or places[name].file != file:
            raise ValueError(f"{path} is half or corrupted: {file} has no {name!r}, which the index expects there")
    for part in parts:
        if part.name not in places or not part.fits(places[part.name].shape):
            raise ValueError(
                f"{path} is half or corrupted: {INDEX} has a checksum of a part of {part.name!r} that is nowhere"
            )
    return places, parts


def _look_into(path: str, file: str) -> dict[str, Place]:
    try:
        with open(os.path.join(path, file), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            return read_header(file, opened.read(header_length(file, opened.read(8), size)), size)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{path} is half: it has no {file}, which the index names") from None


def verify(path: str, places: Mapping[str, Place], parts: Iterable[Part]) -> None:
    """Compare parts with their checksums.

    Raises:
        ValueError: One differs.
    """
    with Files(path, os.O_RDONLY) as files:
        for part in parts:
            place, found = places[part.name], 0
            for offset, length in place.chunks(part.start, part.size):
                chunk = bytearray(length)
                _read(files[place.file], memoryview(chunk), offset)
                found = crc32(chunk, found)
            if found != part.checksum:
                raise ValueError(f"{path} is corrupted: {place.file} has other bytes of {part.name!r} than were saved")


def read(path: str, places: Mapping[str, Place], tensors: Mapping[str, torch.Tensor], pieces: Iterable[Piece]) -> None:
    """Read parts of tensors: each is a whole tensor here."""
    with Files(path, os.O_RDONLY) as files:
        for piece in pieces:
            place, memory, done = places[piece.name], memory_of(tensors[piece.name]), 0
            for offset, length in place.chunks(piece.source_start, piece.size):
                _read(files[place.file], memory[done : done + length], offset)
                done += length


class Files(dict[str, int]):
    """The files of a folder, each opened once."""

    def __init__(self, folder: str, flags: int) -> None:
        super().__init__()
        self._folder = folder
        self._flags = flags

    def __missing__(self, file: str) -> int:
        self[file] = opened = os.open(os.path.join(self._folder, file), self._flags | os.O_CLOEXEC)
        return opened

    def sync(self) -> None:
        for opened in self.values():
            os.fsync(opened)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        for opened in self.values():
            os.close(opened)


def _write(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        written = os.pwrite(file, memory, offset)
        memory, offset = memory[written:], offset + written


def _read(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(file, [memory], offset)
        if not count:
            raise ValueError(f"a file of the checkpoint ends at byte {offset}: it was changed since it was opened")
        memory, offset = memory[count:], offset + count


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Checkpoints(Actor):
    """Writes the shards of this process, and reads new ones."""

    def __init__(self, caller: Caller, store: Store, resharding: Resharding) -> None:
        self._caller = caller
        self._store = store
        self._resharding = resharding

    @method(ordered=False)
    async def save(
        self,
        path: str,
        files: Sequence[File],
        places: Mapping[str, Place],
        orders: Mapping[int, Sequence[Piece]],
        sources: Opaque,
    ) -> None:
        """Have each rank write its pieces, and give the checkpoint its name.

        Raises:
            OSError: A file cannot be written.
            DaftError: A rank is lost, or its shard.
        """
        ranks = cast("Mapping[int, Source]", sources.content)
        async with self._thread() as run:
            draft = Draft(path)
            try:
                await run(partial(draft.begin, files))
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._have_written(ranks[rank], draft.folder, places, pieces))
                        for rank, pieces in orders.items()
                    ]
                parts = [part for task in tasks for part in task.result()]
                await run(partial(draft.finish, places, parts))
            except BaseExceptionGroup as errors:
                # The others follow from the first one, or say the same.
                raise errors.exceptions[0] from None
            finally:
                await run(draft.end)

    async def _have_written(
        self, source: Source, folder: str, places: Mapping[str, Place], pieces: Sequence[Piece]
    ) -> list[Part]:
        actor = checkpoints_of(self._caller, source.peer, source.label)
        try:
            here = {piece.name: places[piece.name] for piece in pieces}
            return await actor.write(Opaque(source.shard), folder, here, pieces)
        except FileNotFoundError as error:
            add_note(error, f"{source.label} does not see this folder: all ranks have to use one file system")
            raise

    @method(ordered=False)
    async def write(
        self, shard: Opaque, folder: str, places: Mapping[str, Place], pieces: Sequence[Piece]
    ) -> list[Part]:
        """Write pieces of a shard, of which this gets the ref."""
        parts: list[Part] = []

        def job(tensors: Mapping[str, torch.Tensor], pieces: list[Piece]) -> None:
            parts[:] = write(folder, places, tensors, pieces)

        async with self._thread() as run:
            await self._resharding.read(shard.content, [list(pieces)], job, run)
        await self._resharding.check_unchanged(shard)
        return parts

    @method(ordered=False)
    async def look(self, path: str) -> Contents:
        """As `look`."""
        async with self._thread() as run:
            found: Contents = await run(partial(look, path))
        return found

    @method(ordered=False)
    async def verify(self, path: str, places: Mapping[str, Place], parts: Sequence[Part]) -> None:
        """As `verify`."""
        async with self._thread() as run:
            await run(partial(verify, path, places, parts))

    @method(ordered=False)
    async def load(
        self, path: str, places: Mapping[str, Place], new: Sequence[Expected], pieces: Sequence[Piece]
    ) -> dict[str, torch.Tensor]:
        """Read a shard."""
        tensors = {name: self._resharding.allocate(shape, dtype) for name, dtype, shape in new}
        async with self._thread() as run:
            await run(partial(read, path, places, tensors, pieces))
        return borrow(tensors)

    @asynccontextmanager
    async def _thread(self) -> AsyncGenerator[Callable[[Callable[[], Any]], Awaitable[Any]]]:
        """A thread for files: the helper thread has values to copy that others wait for."""
        thread = HelperThread("checkpoint", asyncio.get_running_loop())
        try:
            yield lambda job: thread.run_to_end(self._store.in_order(job))
        finally:
            thread.close()


def checkpoints_of(caller: Caller, peer: PeerId, label: str) -> Checkpoints:
    return cast("Checkpoints", caller.handle(peer, CHECKPOINTS, label, Checkpoints))
