"""The `__main__` of a process of actors: the parts of the script that have come.

pickle looks up its names there, also for processes that multiprocessing starts by spawn or forkserver. Those would run
the script again, which may not be on their machine, or be a notebook, or start a runtime. They get these parts.
"""

from __future__ import annotations

import pickle
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from aiodaft._runtime.serialization.scripts import await_main, script_of


def take_main() -> None:
    await_main(ModuleSpec(_Name("__main__"), None))


class _Name(str):
    """The name of the module in this process. multiprocessing tells it a new process, which makes the module of it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_of, (list(filter(None, map(_packed, list(vars(sys.modules["__main__"]))))),)


def _packed(name: str) -> bytes | None:
    """A name of the script and its value here; None if it cannot travel."""
    from aiodaft._runtime.serialization.code_pickler import pickle_code  # noqa: PLC0415 - slow to import

    script = script_of(vars(sys.modules["__main__"]))
    if script is None or name.startswith("__"):
        return None
    try:
        return pickle_code((script, name, script.namespace[name]))
    except Exception:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        return None


def _main_of(names: list[bytes]) -> str:
    take_main()
    for packed in names:
        namespace, name, value = pickle.loads(packed)
        namespace.setdefault(name, value)
    return "__main__"
