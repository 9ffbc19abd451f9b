"""The names that completion offers on users' objects are those that are for users."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

import aiodaft
from aiodaft.service import Service

OF_SPAWNERS = {"get_or_create", "group", "mesh", "on", "pool", "spawn"}
OF_SCOPES = OF_SPAWNERS | {"info", "kill", "scope", "stop"}
OF_FUTURES = {"add_done_callback", "cancel", "cancelled", "done", "exception", "remove_done_callback", "result"}

NAMES: dict[type, set[str]] = {
    aiodaft.Actor: set(),
    aiodaft.Runtime: OF_SCOPES
    | {"aclose", "lookup", "name", "names", "nodes", "overview", "put", "ship", "stack", "trace", "watch"}
    | {"traffic"},
    aiodaft.Scope: OF_SCOPES,
    aiodaft.typing.Placement: OF_SPAWNERS,
    aiodaft.typing.Mesh: OF_SPAWNERS | {"slices"},
    aiodaft.typing.Slice: OF_SPAWNERS | {"gpus", "node"},
    aiodaft.Ref: OF_FUTURES | {"free", "into", "parts", "ready", "released", "value"},
    aiodaft.Refs: {"cancel", "gather"},
    aiodaft.Stream: {"aclose"},
    aiodaft.Channel: {"aclose", "recv", "send"},
    aiodaft.pool.Pool: {"executor", "group", "map", "resize", "submit"},
    aiodaft.Graph: {"aclose", "describe", "draw", "replace", "times"},
    aiodaft.Group: {"all", "along", "any", "axes", "each", "epoch", "heal", "id", "map", "remove", "renew", "resize",
                    "scale", "split", "with_policy"},
    Service: {"call", "get", "handle"},
}  # fmt: skip


def set_by_methods(cls: type) -> set[str]:
    """The attributes that methods assign, which editors offer, too."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("cls", NAMES, ids=lambda cls: cls.__name__)
def test_the_names_without_underscore_are_those_of_users_and_have_docs(cls: type) -> None:
    own = [base for base in cls.__mro__ if base.__module__.startswith("aiodaft")]
    names = {name for name in dir(cls) if not name.startswith("_")}
    assert all(getattr(cls, name).__doc__ for name in names)
    names |= {name for base in own for name in set_by_methods(base) if not name.startswith("_")}
    assert names == NAMES[cls]


def test_a_runtime_shows_the_same_as_its_class() -> None:
    assert {name for name in dir(aiodaft.Runtime()) if not name.startswith("_")} == NAMES[aiodaft.Runtime]
