"""Importing aiodaft has no effects, and loads nothing that a program may never need (row CR10)."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import aiodaft

SUPPORT = Path(__file__).parent / "support"

# Large, optional, or slow; code that needs one of them imports it when it does.
HEAVY = {
    "anyio", "click", "cloudpickle", "fastapi", "msgspec", "multiprocessing", "numpy", "pandas", "psutil", "rich",
    "starlette", "torch", "ucxx", "uvicorn", "uvloop",
}  # fmt: skip
# Modules of the standard library that take milliseconds and that few programs need.
SLOW = {"hashlib", "hmac", "pathlib", "platform", "secrets", "urllib"}

# It loads first the modules with effects of their own: typing registers types with copyreg, and ctypes may open libffi.
LOOK = """
    import asyncio, asyncio.events, atexit, copyreg, gc, json, logging, os, resource, signal, sys, threading, warnings
    import ctypes, typing

    def children():
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return file.read().split()

    def look():
        return {
            "environment": dict(os.environ),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "kernel threads": len(os.listdir("/proc/self/task")),
            "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                            if os.path.exists(f"/proc/self/fd/{fd}")),
            "processes": children(),
            "loop policy": repr(asyncio.events._event_loop_policy),
            "running loop": repr(asyncio.events._get_running_loop()),
            "signal handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
            "exit functions": atexit._ncallbacks(),
            "hooks": [repr(sys.excepthook), repr(sys.unraisablehook), repr(threading.excepthook), repr(sys.meta_path)],
            "log handlers": repr(logging.getLogger().handlers),
            "log levels": [logging.getLogger().level, logging.getLogger("aiodaft").level],
            "warning filters": repr(warnings.filters),
            "pickling": sorted(map(repr, copyreg.dispatch_table)),
            "collector": [gc.isenabled(), gc.get_threshold()],
            "import path": list(sys.path),
            "recursion": sys.getrecursionlimit(),
            "working directory": os.getcwd(),
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
"""


def run(code: str) -> Any:
    """The output of a fresh interpreter, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def heavy_of(modules: list[str]) -> set[str]:
    return {name for name in modules if "." not in name} & HEAVY


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """The state before and after the import, and the loaded modules."""
    code = """
        before = look()
        loaded = set(sys.modules)
        import aiodaft
        for name in aiodaft.__all__:
            getattr(aiodaft, name)
        print(json.dumps({"before": before, "after": look(), "loaded": sorted(set(sys.modules) - loaded)}))
    """
    found: dict[str, Any] = run(textwrap.dedent(LOOK) + textwrap.dedent(code))
    return found


def test_importing_changes_nothing_in_the_process(seen: dict[str, Any]) -> None:
    changed = {name: (was, seen["after"][name]) for name, was in seen["before"].items() if seen["after"][name] != was}
    assert changed == {}


def test_importing_loads_nothing_heavy(seen: dict[str, Any]) -> None:
    assert "aiodaft.runtime" in seen["loaded"]
    assert heavy_of(seen["loaded"]) == set()
    assert SLOW.isdisjoint(seen["loaded"])


def test_every_public_module_can_be_imported_first_and_loads_nothing_heavy() -> None:
    code = """
        import gc, importlib, json, pkgutil, sys
        import aiodaft
        gc.disable()
        names = [info.name for info in pkgutil.iter_modules(aiodaft.__path__, "aiodaft.") if "._" not in info.name]
        # The modules that the package itself has loaded are there first in any case.
        first = set(sys.modules)
        for name in names:
            loaded = {module for module in sys.modules.keys() - first if module.startswith("aiodaft")}
            # These are below the public modules, as import-linter checks.
            below = {module for module in loaded if module.startswith(("aiodaft._protocol", "aiodaft_transport"))}
            for module in loaded - below:
                del sys.modules[module]
            importlib.import_module(name)
        print(json.dumps([names, sorted(sys.modules)]))
    """
    names, modules = run(code)
    assert {"aiodaft.runtime", "aiodaft.actor", "aiodaft.ref", "aiodaft.channel", "aiodaft.web"} <= set(names)
    assert heavy_of(modules) == set()


def test_the_package_offers_what_its_stub_declares_and_nothing_else() -> None:
    stub = ast.parse(Path(aiodaft.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name for node in imports for alias in node.names if node.module == "aiodaft"}
    declared = {alias.name: node.module for node in imports for alias in node.names if node.module != "aiodaft"}
    assert sorted(declared) == aiodaft.__all__
    # A newcomer reads this list.
    assert len(declared) <= 45
    assert {name for name in dir(aiodaft) if not name.startswith("_")} >= {*aiodaft.__all__, *modules} - {"__version__"}
    for name in modules:
        assert getattr(aiodaft, name) is importlib.import_module(f"aiodaft.{name}")
    for name, module in declared.items():
        assert getattr(aiodaft, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="has no attribute 'Actors'"):
        aiodaft.Actors  # noqa: B018


def test_a_process_loads_only_the_modules_of_the_package_that_it_uses() -> None:
    code = f"""
        import json, sys
        sys.path.insert(0, {str(SUPPORT)!r})
        import aiodaft

        def loaded():
            return sorted(name for name in sys.modules if name.partition(".")[0] in ("aiodaft", "aiodaft_transport"))

        imported = loaded()

        class Looker(aiodaft.Actor):
            @aiodaft.method
            async def loaded(self):
                before = loaded()
                aiodaft.current_actor(), aiodaft.current_group(), aiodaft.Channel, aiodaft.deadline, aiodaft.Group
                return before, sorted(set(loaded()) - set(before))

        async def main():
            async with aiodaft.Runtime(preload=()) as rt, rt.group(1, Looker) as lookers:
                return await lookers[0].loaded()

        print(json.dumps([imported, *aiodaft.run(main()), loaded()]))
    """
    imported, worker, loaded_by_methods, controller = run(code)
    assert loaded_by_methods == []
    assert len(imported) < 10, imported
    assert not {"aiodaft.runtime", "aiodaft.graph", "aiodaft.web", "aiodaft._runtime.node.node_agent"} & set(worker)
    assert not {"aiodaft.web", "aiodaft.checkpoint", "aiodaft.resharding"} & set(controller)
    # Each module costs half a millisecond of each start.
    assert len(worker) <= 262
    assert len(controller) <= 310


def test_a_runtime_without_tensors_loads_no_torch_anywhere() -> None:
    code = f"""
        import asyncio, json, sys
        sys.path.insert(0, {str(SUPPORT)!r})
        import aiodaft

        class Looker(aiodaft.Actor):
            @aiodaft.method
            async def loaded(self):
                import sys
                return sorted(name for name in sys.modules if "." not in name)

        async def main():
            async with aiodaft.Runtime() as rt:
                return await (await rt.spawn(Looker)).loaded()

        there = asyncio.run(main())
        print(json.dumps([there, sorted(sys.modules)]))
    """
    in_the_worker, here = run(code)
    assert "aiodaft" in in_the_worker
    assert heavy_of(here) & {"torch", "numpy", "pandas", "fastapi", "ucxx"} == set()
    assert heavy_of(in_the_worker) & {"torch", "numpy", "pandas", "fastapi", "ucxx"} == set()


def test_tensors_of_the_host_load_nothing_that_is_for_gpus() -> None:
    pytest.importorskip("torch")
    code = f"""
        import asyncio, json, sys
        sys.path.insert(0, {str(SUPPORT)!r})
        import aiodaft, torch
        from torch_actors import Keeper

        class Looker(Keeper):
            @aiodaft.method
            async def loaded(self, x):
                import sys
                return sorted(sys.modules)

        async def main():
            async with aiodaft.Runtime() as rt:
                looker = await rt.spawn(Looker)
                return await looker.loaded(await looker.make(1 << 20, 1.0))

        print(json.dumps([asyncio.run(main()), sorted(sys.modules)]))
    """
    for loaded in run(code):
        assert "aiodaft._runtime.serialization.encoded" in loaded
        names = {name.split(".")[-1] for name in loaded if name.startswith("aiodaft")}
        assert names & {"cuda", "cuda_driver", "cuda_pull", "device", "device_events", "devices", "gpus"} == set()


def test_a_closed_runtime_leaves_the_process_as_it_was() -> None:
    code = """
        import aiodaft

        class Idle(aiodaft.Actor):
            pass

        async def main():
            async with aiodaft.Runtime() as rt:
                await rt.spawn(Idle)

        before = look()
        asyncio.run(main())
        gc.collect()
        after = look()
        # asyncio.run itself sets a policy where there was none.
        print(json.dumps({name: [before[name], after[name]] for name in before
                          if before[name] != after[name] and name != "loop policy"}))
    """
    changed = run(textwrap.dedent(LOOK) + textwrap.dedent(code))
    # One exit function of concurrent.futures, which asyncio.to_thread brings.
    changed.pop("exit functions", None)
    assert changed == {}
