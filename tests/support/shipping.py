"""A program that ships a folder with a module that only it can import, until its standard input ends or it is killed.

It prints, for an actor on each of the nodes that are named on its command line, the version of the module and its file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import aiodaft

MODULE = """
import os
import sys

import aiodaft
from helpers.version import VERSION


class Shipped(aiodaft.Actor):
    @aiodaft.method
    async def version(self) -> tuple[str, str]:
        return VERSION, __file__

    @aiodaft.method
    async def pid(self) -> int:
        return os.getpid()

    @aiodaft.method
    async def version_on(self, node: str) -> tuple[str, str]:
        child = await aiodaft.current_runtime().on(node=node).spawn(Shipped)
        return await child.version()

    @aiodaft.method
    async def ship(self) -> None:
        await aiodaft.current_runtime().ship(__file__)

    @aiodaft.method
    async def path(self) -> list[str]:
        return sys.path
"""


def write_code(folder: Path, version: str) -> Path:
    """Write a module, and a package that it uses."""
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "version.py").write_text(f"VERSION = {version!r}\n")
    (folder / "shipped_module.py").write_text(MODULE)
    return folder


@contextmanager
def only_here(folder: Path, name: str = "shipped_module") -> Generator[Any]:
    """Import a module of a folder which is not in `sys.path` afterwards, so that no worker finds it there."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        module = import_module(name)
    finally:
        sys.path.remove(str(folder))
    try:
        yield module
    finally:
        for each in set(sys.modules) - before:
            del sys.modules[each]


async def main(folder: Path, nodes: list[str]) -> None:
    with only_here(folder) as module:
        async with aiodaft.Runtime() as rt:
            await rt.ship(folder)
            actors = [await rt.on(node=node).spawn(module.Shipped) for node in nodes or [None]]
            print(json.dumps([await actor.version() for actor in actors]), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    os.environ.setdefault("AIODAFT_ADDRESS", "")
    aiodaft.run(main(Path(sys.argv[1]), sys.argv[2:]))
