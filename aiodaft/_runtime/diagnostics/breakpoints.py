"""Has `breakpoint()`, and other functions of the module pdb, open a debugger of an actor; see `attach.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def debug_at(terminal: str) -> None:
    loaded = sys.modules.get("pdb")
    if loaded is None:
        # It takes 10 ms to load, and few programs need it.
        sys.meta_path.insert(0, _PdbFinder(terminal))
    else:
        _replace_pdb(loaded, terminal)


class _PdbFinder:
    def __init__(self, terminal: str) -> None:
        self._terminal = terminal

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "pdb":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load: Callable[[ModuleType], object] = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace_pdb(module, self._terminal)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # as good as the method
        return spec


def _replace_pdb(loaded: Any, terminal: str) -> None:
    from aiodaft._runtime.diagnostics.actor_pdb import ActorPdb  # noqa: PLC0415 - it needs pdb

    ActorPdb.terminal = terminal
    loaded.Pdb = ActorPdb
