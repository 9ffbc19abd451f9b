"""Code that programs ship: a program offers archives; a node unpacks each that its workers need, once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, cast

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.ids import CODE, PeerId
from aiodaft._protocol.node.worker import MAX_BYTES, MAX_FILES, Code, File, check_files, digest_of
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor
from aiodaft.exceptions import DaftError, SpawnFailed
from aiodaft.methods import method
from aiodaft_transport.system import make_folder, remove_folder, sweep_folders

_ADVICE: Final = "ship a folder with nothing but modules, and have actors read their data from elsewhere"


def pack_code(path: str) -> bytes:
    """An archive of a folder of modules, of one package (a folder with `__init__.py`), or of one module (`*.py`).

    Hidden files and folders, `__pycache__` and `*.pyc` are left out.

    Raises:
        OSError: There is no such folder or file, or it cannot be read.
        ValueError: It is neither, has no files or too many, or has a link that leads out of it.
    """
    path = os.path.abspath(path)
    name = os.path.basename(path)
    if os.path.isdir(path):
        is_package = os.path.exists(os.path.join(path, "__init__.py"))
        found = _files_in(path, f"{name}/" if is_package else "")
    elif (name.endswith(".py") and os.path.isfile(path)) or not os.path.exists(path):
        found = iter([(name, path)])
    else:
        raise ValueError(f"{path} cannot be shipped: it is neither a folder nor a module (*.py)")
    files = list(_read_files(path, found))
    if not files:
        raise ValueError(f"{path} cannot be shipped: there is no file in it")
    return pack([list(file) for file in files])


def _files_in(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    root = os.path.realpath(folder)
    # Each with its real path and those of the folders above it, so that links make no endless way.
    folders: list[tuple[str, str, tuple[str, ...]]] = [(folder, prefix, (root,))]
    while folders:
        folder, prefix, above = folders.pop()
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            if entry.name.startswith(".") or entry.name == "__pycache__" or entry.name.endswith(".pyc"):
                continue
            real = os.path.realpath(entry.path)
            if entry.is_symlink() and os.path.commonpath([real, root]) != root:
                raise ValueError(f"{entry.path} leads out of {root}, to {real}: ship that, too, or remove the link")
            if entry.is_file():
                yield prefix + entry.name, entry.path
            elif not entry.is_dir():
                raise ValueError(f"{entry.path} cannot be shipped: it is neither a file nor a folder")
            elif real not in above:
                folders.append((entry.path, f"{prefix}{entry.name}/", (*above, real)))


def _read_files(path: str, found: Iterator[tuple[str, str]]) -> Iterator[File]:
    room = MAX_BYTES
    for number, (name, at) in enumerate(found):
        if number == MAX_FILES:
            raise ValueError(f"{path} cannot be shipped: it has more than {MAX_FILES:,} files: {_ADVICE}")
        with open(at, "rb") as file:
            status = os.fstat(file.fileno())
            room -= status.st_size
            if room < 0:
                raise ValueError(
                    f"{path} cannot be shipped: with {at} ({status.st_size:,} bytes) it has more than {MAX_BYTES:,} "
                    f"bytes: {_ADVICE}"
                )
            yield File(name, bool(status.st_mode & 0o100), file.read(status.st_size))


def unpack_code(archive: bytes, folder: str) -> None:
    """Write the files of an archive of `pack_code` to an empty folder.

    Raises:
        OSError: They cannot be written.
        ValueError: It is too large, or a path in it leads out of the folder. Nothing was written.
    """
    files = [File(*entry) for entry in unpack(archive)]
    check_files(files)
    for path, executable, content in files:
        at = os.path.join(folder, path)
        os.makedirs(os.path.dirname(at), exist_ok=True)
        with open(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if executable else 0o600), "wb") as file:
            file.write(content)


PREFIX: Final = "aiodaft-code-"
# In each folder with code; no file of an archive is called like this.
_ARCHIVE: Final = ".archive"


class _Kept:
    coming: asyncio.Task[str]

    def __init__(self) -> None:
        self.users: set[Hashable] = set()


class ShippedCode(Actor):
    """The code that this process offers and, if it is a node, the code on its machine.

    Args:
        fetch: Gives the archive that another process offers under a digest.
    """

    def __init__(self, process: Process, fetch: Callable[[PeerId, str], Awaitable[bytes]]) -> None:
        self._process = process
        self._fetch = fetch
        self._offered: dict[str, bytes] = {}
        self._last: dict[str, str] = {}
        # The parent of the folders, and the descriptor that locks this.
        self._root: str | None = None
        self._lock: int | None = None
        self._last_folder = 0
        self._kept: dict[str, _Kept] = {}

    async def offer(self, path: str) -> None:
        """Have the workers of actors that this process spawns from now on import the present content of a path.

        Raises:
            OSError, ValueError: It cannot be packed; see `pack_code`.
        """
        path, digest, archive = await self._process.in_thread(partial(_packed, path))
        self._offered[digest] = archive
        self._last.pop(path, None)
        self._last[path] = digest
        self._process.code = Code(self._process.id, tuple(dict.fromkeys(reversed(self._last.values()))))

    @method
    async def archive(self, digest: str) -> bytes:
        found = self._offered.get(digest)
        if found is None:
            folder = await asyncio.shield(self._kept[digest].coming)
            found = await self._process.in_thread(partial(_read, f"{folder}/{_ARCHIVE}"))
        return found

    async def folders(self, code: Code, *users: Hashable) -> list[str]:
        """The folders of code on this machine, until the last of its users is gone.

        Raises:
            SpawnFailed: It could not be brought here.
        """
        found = [self._kept.get(digest) or self._keep(code.source, digest) for digest in code.digests]
        for kept in found:
            kept.users.update(users)
        try:
            return [await asyncio.shield(kept.coming) for kept in found]
        except (DaftError, OSError, ValueError) as error:
            raise SpawnFailed(
                f"the code that was shipped did not come to {self._process.options.node}: {error}"
            ) from error

    def _keep(self, source: PeerId, digest: str) -> _Kept:
        kept = self._kept[digest] = _Kept()
        kept.coming = self._process.tasks.start_ahead(self._bring(kept, source, digest), name="bring code")
        return kept

    async def _bring(self, kept: _Kept, source: PeerId, digest: str) -> str:
        try:
            archive = await self._fetch(source, digest)
            return await self._process.in_thread(partial(self._unpack, archive, digest))
        except BaseException:
            if self._kept.get(digest) is kept:
                del self._kept[digest]
            raise

    def _unpack(self, archive: bytes, digest: str) -> str:
        # It may have come in plain bytes; the digest came in a message.
        if digest_of(archive) != digest:
            raise ValueError("it was changed on its way")
        # It may be gone: some systems sweep temporary files.
        if self._root is None or not os.path.isdir(self._root):
            self.close()
            self._root, self._lock = _new_root()
        self._last_folder += 1
        folder = f"{self._root}/{self._last_folder}"
        os.mkdir(folder, mode=0o700)
        try:
            unpack_code(archive, folder)
            with open(f"{folder}/{_ARCHIVE}", "xb") as file:
                file.write(archive)
        except BaseException:
            _remove(folder)
            raise
        return folder

    def release(self, user: Hashable) -> None:
        for digest, kept in list(self._kept.items()):
            kept.users.discard(user)
            # At the end of the process, `close` removes everything.
            if not kept.users and self._process.closed is None:
                del self._kept[digest]
                self._process.create_task(self._remove(kept), name="remove code")

    async def _remove(self, kept: _Kept) -> None:
        await asyncio.wait([kept.coming])
        if not kept.coming.cancelled() and kept.coming.exception() is None:
            await self._process.in_thread(partial(_remove, kept.coming.result()))

    def close(self) -> None:
        """Remove the folders, when no worker is left. Blocks."""
        if self._root is not None and self._lock is not None:
            remove_folder(self._root)
            os.close(self._lock)
            self._root = self._lock = None


def host_code(peer: Peer) -> ShippedCode:
    async def fetch(source: PeerId, digest: str) -> bytes:
        offer = cast("ShippedCode", peer.caller.handle(source, CODE, f"code of {source}", ShippedCode))
        return await offer.archive(digest)

    code = ShippedCode(peer.process, fetch)
    peer.add_actor(CODE, "code", code)
    peer.process.provide(ShippedCode, code)
    return code


def _packed(path: str) -> tuple[str, str, bytes]:
    archive = pack_code(path)
    return os.path.realpath(path), digest_of(archive), archive


def _read(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _new_root() -> tuple[str, int]:
    from tempfile import gettempdir  # noqa: PLC0415 - takes long to import, and few programs send code

    sweep_folders(gettempdir(), PREFIX)
    return make_folder(gettempdir(), PREFIX)


def _remove(folder: str) -> None:
    # Its workers are being killed: files that they still compile find no place here any more.
    gone = f"{folder}.gone"
    with suppress(FileNotFoundError):
        os.rename(folder, gone)
    remove_folder(gone)
