"""Code that programs ship: a program offers archives; a node unpacks each that its workers need, once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Final, cast

from aiodaft._protocol.ids import CODE, PeerId
from aiodaft._protocol.node.code import Code, digest_of
from aiodaft._runtime.node.code_files import pack_code, unpack_code
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Process
from aiodaft.actor import Actor
from aiodaft.exceptions import DaftError, SpawnFailed
from aiodaft.methods import method
from aiodaft_transport import folders

PREFIX: Final = "aiodaft-code-"
# In each folder with code; no file of an archive is called like this.
_ARCHIVE: Final = ".archive"


class _Kept:
    """A folder on this machine, and its users: actors, and the owners of actors."""

    coming: asyncio.Task[str]

    def __init__(self) -> None:
        self.users: set[Hashable] = set()


class ShippedCode(Actor):
    """The code that this process offers and, if it is a node, the code on its machine.

    Args:
        process: The process.
        fetch: Gives the archive that another process offers under a digest.
    """

    def __init__(self, process: Process, fetch: Callable[[PeerId, str], Awaitable[bytes]]) -> None:
        self._process = process
        self._fetch = fetch
        # By their digests; and the last digest of each path.
        self._offered: dict[str, bytes] = {}
        self._last: dict[str, str] = {}
        # The parent of the folders, and the descriptor that locks this.
        self._root: str | None = None
        self._lock: int | None = None
        self._last_folder = 0
        self._kept: dict[str, _Kept] = {}

    # In a program.

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
        """The archive that this process offers under a digest, or has on its machine: for its workers' actors."""
        found = self._offered.get(digest)
        if found is None:
            folder = await asyncio.shield(self._kept[digest].coming)
            found = await self._process.in_thread(partial(_read, f"{folder}/{_ARCHIVE}"))
        return found

    # On a node.

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
            # The next actor that needs it has it brought again.
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
        """An actor, or an owner of actors, is gone. Idempotent."""
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
        """Remove the folders on this machine. Blocks. Call it when no worker is left."""
        if self._root is not None and self._lock is not None:
            folders.remove(self._root)
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

    folders.sweep(gettempdir(), PREFIX)
    return folders.make(gettempdir(), PREFIX)


def _remove(folder: str) -> None:
    # Its workers are being killed: files that they still compile find no place here any more.
    gone = f"{folder}.gone"
    with suppress(FileNotFoundError):
        os.rename(folder, gone)
    folders.remove(gone)
