"""Folders of modules as archives, and back. All of it blocks: call it in a thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from aiodaft._protocol.connections.codec import pack, unpack
from aiodaft._protocol.node.code import MAX_BYTES, MAX_FILES, File, check_files

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
    files = list(_read(path, found))
    if not files:
        raise ValueError(f"{path} cannot be shipped: there is no file in it")
    return pack([list(file) for file in files])


def _files_in(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The files of a folder: their names in an archive, and their paths."""
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


def _read(path: str, found: Iterator[tuple[str, str]]) -> Iterator[File]:
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
    """Write the files of an archive that `pack_code` made to an empty folder.

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
