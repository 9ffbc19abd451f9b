"""Finding libucp: the system's own if it is new enough, because it may have verbs, else the one in a wheel."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aiodaft_transport.exceptions import Unreachable
from aiodaft_transport.ucx.ucp import OLDEST, Library

LIBRARY_VARIABLE: Final = "AIODAFT_UCX_LIBRARY"
_SONAME: Final = "libucp.so.0"
# Two versions in one process would mix, because their libraries have the same names: ask in another process.
_PROBE: Final = f"""
import ctypes
numbers = [ctypes.c_uint() for _ in range(3)]
ctypes.CDLL({_SONAME!r}).ucp_get_version(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers))
"""


def load() -> Library:
    """The library to use, loaded once per process.

    Raises:
        Unreachable: There is none; the message names the package to install.
    """
    return _load(os.environ.get(LIBRARY_VARIABLE) or None)


@functools.cache
def _load(chosen: str | None) -> Library:
    problems: list[str] = []
    for path in [chosen] if chosen else _candidates():
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            problems.append(str(error))
            continue
        if library.version >= OLDEST:
            return library
        problems.append(f"{path} is UCX {'.'.join(map(str, library.version))}")
    said = f"${LIBRARY_VARIABLE} names none" if chosen else "none was found"
    raise Unreachable(
        f"transport 'ucx' needs UCX {'.'.join(map(str, OLDEST))} or later, and {said} ({'; '.join(problems)}); "
        "install the system's (libucx0, ucx) or `pip install aiodaft[ucx-cu13]`"
    )


def _candidates() -> Iterator[str]:
    # Not imported: that would load all of it.
    wheel = importlib.util.find_spec("libucx")
    folders = (wheel.submodule_search_locations or ()) if wheel is not None else ()
    if not folders or _system_version() >= OLDEST:
        # The loader's own search: LD_LIBRARY_PATH, ld.so.cache.
        yield _SONAME
    for folder in folders:
        yield str(Path(folder) / "lib" / _SONAME)


def _system_version() -> tuple[int, ...]:
    """The version of the system's library; empty if there is none."""
    probe = subprocess.run([sys.executable, "-ISc", _PROBE], capture_output=True, text=True, check=False)
    return tuple(map(int, probe.stdout.split()))
