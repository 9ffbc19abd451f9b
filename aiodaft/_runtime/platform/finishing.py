"""The steps of Python at the end of a process, for one that does not wait for its threads."""

from __future__ import annotations

import atexit
import gc
import io
import weakref
from contextlib import suppress
from typing import Any, Final

# The class of all files. `io.IOBase` is an abstract class, which those in C are registered with.
_FILE: Final = io.IOBase.__mro__[1]


def finish() -> None:
    """Run the functions registered with `atexit`, and write out the files that are open."""
    with suppress(BaseException):
        _keep_operators()
        atexit._run_exitfuncs()  # as multiprocessing does
    files: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), _FILE)]
    _flush(files)
    # Those in Python, such as of gzip, write an end to the file below them.
    for file in files:
        if type(file).__module__ != "_io":
            with suppress(Exception):
                file.close()
    _flush(files)


def _keep_operators() -> None:
    """Have torch not withdraw its operators from itself: they end with the process, and that takes it 30 ms."""
    finalizers: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]  # private
    for finalizer, info in list(finalizers.items()):
        if getattr(info.func, "__module__", None) == "torch.library":
            finalizer.atexit = False


def _flush(files: list[Any]) -> None:
    for file in files:
        with suppress(Exception):
            file.flush()
