"""A node has each archive brought once, and keeps it for as long as something needs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rooms import Bench

from aiodaft._protocol.connections.codec import pack
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import Code, digest_of
from aiodaft._runtime.node.shipped_code import ShippedCode
from aiodaft.exceptions import PeerLost, SpawnFailed

PROGRAM = PeerId("program")
ARCHIVE = pack([["a.py", False, b"content"]])
CODE = Code(PROGRAM, (digest_of(ARCHIVE),))


def left_in(folder: Path) -> list[Path]:
    """The files in the folders of a node."""
    return [path for root in folder.iterdir() for path in root.iterdir()]


class Node(Bench):
    """A node without a program: the test answers for that."""

    def __init__(self) -> None:
        super().__init__()
        self.code = ShippedCode(self.process, self.fetch)
        self.asked: list[tuple[PeerId, str]] = []
        self.answer: bytes | Exception = ARCHIVE

    async def fetch(self, source: PeerId, digest: str) -> bytes:
        self.asked.append((source, digest))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def folders(self, *users: str, code: Code = CODE) -> list[Path]:
        wanted = asyncio.ensure_future(self.code.folders(code, *users))  # noqa: TID251 - awaited below
        await self.turn()
        return list(map(Path, await wanted))

    async def turn(self) -> None:
        """Let tasks and the thread finish their work."""
        for _ in range(5):
            await asyncio.sleep(0)
            while self.helper.jobs:
                self.helper.turn()


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Node()
    yield made
    await made.process.tasks.aclose()
    made.code.close()
    assert os.listdir(tmp_path) == []


async def test_actors_that_need_the_same_have_it_brought_once(node: Node) -> None:
    both = asyncio.gather(node.folders("one"), node.folders("two"))
    (first,), (second,) = await both
    assert first == second == (await node.folders("three"))[0]
    assert (first / "a.py").read_bytes() == b"content"
    assert node.asked == [(PROGRAM, CODE.digests[0])]


async def test_it_is_removed_with_the_last_that_needs_it_and_brought_again_for_the_next(node: Node) -> None:
    [folder] = await node.folders("one", "owner")
    node.code.release("one")
    node.code.release("somebody else")
    await node.turn()
    assert folder.exists()
    node.code.release("owner")
    # Before it is removed.
    [again] = await node.folders("two")
    await node.turn()
    assert (folder.exists(), again.exists()) == (False, True)
    assert len(node.asked) == 2


async def test_what_is_given_up_while_it_is_brought_is_removed(node: Node, tmp_path: Path) -> None:
    wanted = asyncio.ensure_future(node.code.folders(CODE, "one"))  # noqa: TID251 - awaited below
    await asyncio.sleep(0)
    wanted.cancel()
    node.code.release("one")
    with pytest.raises(asyncio.CancelledError):
        await wanted
    await node.turn()
    assert left_in(tmp_path) == []


async def test_what_was_changed_on_its_way_is_not_unpacked(node: Node, tmp_path: Path) -> None:
    node.answer = ARCHIVE.replace(b"content", b"CONTENT")
    with pytest.raises(SpawnFailed, match="the code that was shipped did not come to node: it was changed on its way"):
        await node.folders("one")
    assert os.listdir(tmp_path) == []
    node.answer = ARCHIVE
    assert await node.folders("one")


async def test_what_cannot_be_unpacked_leaves_nothing(node: Node, tmp_path: Path) -> None:
    node.answer = pack([["a", False, b""], ["a/b", False, b""]])
    with pytest.raises(SpawnFailed, match="did not come to node: .*File exists"):
        await node.folders("one", code=Code(PROGRAM, (digest_of(node.answer),)))
    assert left_in(tmp_path) == []


async def test_a_program_that_is_gone_is_told_and_asked_again_next_time(node: Node) -> None:
    node.answer = PeerLost("it is gone")
    for _ in range(2):
        with pytest.raises(SpawnFailed, match="did not come to node: it is gone"):
            await node.folders("one")
    assert len(node.asked) == 2


async def test_where_temporary_files_are_swept_there_is_a_new_folder(node: Node, tmp_path: Path) -> None:
    [folder] = await node.folders("one")
    folder.parent.rename(tmp_path / "swept")
    other = pack([["b.py", False, b""]])
    node.answer = other
    [second] = await node.folders("one", code=Code(PROGRAM, (digest_of(other),)))
    assert (second / "b.py").exists()
    (tmp_path / "swept").rename(folder.parent)
    node.code.release("one")
    await node.turn()
    folder.parent.rmdir()
