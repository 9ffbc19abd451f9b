"""Errors in the log. Texts from other processes cannot forge lines there, and are limited in length."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from aiodaft._protocol.diagnostics.printing import cut

logger = logging.getLogger("aiodaft")

# Characters of one text, before some of them are escaped.
_MAX_TEXT: Final = 4 << 10
# Begins every line of a text but the first one, so that none of them looks like a line of the log.
_MARGIN: Final = "  | "


def log_error(what: str, error: BaseException, level: int = logging.ERROR) -> None:
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    info = (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, file, line, "%s", (what,), info, function)
    # Formatters use this text instead of their own; the error itself is in the record, too.
    record.exc_text = _MARGIN + printable(text_of(error))
    logger.handle(record)


def text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its traceback cannot be had: {type(problem).__name__}>"


def printable(text: str) -> str:
    """A text of another process for the log: without control characters, indented, and cut in the middle."""
    return f"\n{_MARGIN}".join(map(_escape, cut(text, _MAX_TEXT).rstrip("\n").split("\n")))


def _escape(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def private(path: str, flags: int) -> int:
    """The `opener` of a file that only this user can read, if it is made; one that is there keeps its mode."""
    return os.open(path, flags, 0o600)


@contextmanager
def private_file(name: str, content: bytes) -> Generator[str]:
    """The path of a file that only this user can read, for as long as the block lasts.

    It lies in memory, without a name in any folder, and ends with this process, if the system has such files. Else it
    is a temporary file.
    """
    if hasattr(os, "memfd_create"):
        fd, path = os.memfd_create(name, os.MFD_CLOEXEC), ""
        os.fchmod(fd, 0o600)
    else:
        import tempfile  # noqa: PLC0415 - takes long to import

        fd, path = tempfile.mkstemp(prefix=f"{name}-")
    try:
        with open(fd, "wb", buffering=0) as file:
            file.write(content)
            yield path or f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        if path:
            os.unlink(path)
