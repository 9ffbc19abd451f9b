"""The names of `aiodaft.tensor`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import aiodaft  # noqa: E402
from aiodaft import tensor  # noqa: E402


def test_each_name_is_where_the_stub_says_and_is_no_module() -> None:
    stub = ast.parse(Path(tensor.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {name.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted(homes) == tensor.__all__
    for name, home in homes.items():
        value = getattr(tensor, name)
        assert getattr(sys.modules[str(home)], name) is value
        # An import of a module would take the place of a name that it shares with it.
        assert f"aiodaft.tensor.{name}" not in sys.modules
    with pytest.raises(AttributeError, match="module 'aiodaft.tensor' has no attribute 'shard'"):
        _ = tensor.shard  # type: ignore[attr-defined]
    assert aiodaft.tensor is tensor


def test_the_package_of_a_worker_loads_nothing_that_only_planning_needs() -> None:
    code = (
        "import sys, aiodaft.tensor.worker; print([m for m in sys.modules if m.startswith('torch.distributed.tensor')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
