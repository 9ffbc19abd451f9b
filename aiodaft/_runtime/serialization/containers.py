"""Walks plain containers: lists, tuples, dicts, named tuples and dataclass instances, at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiodaft.ref import Ref

# Types without parts.
FLAT: Final = frozenset({type(None), bool, int, float, str})


def text_size(values: Iterable[Any]) -> int:
    """Characters and bytes of the texts among values."""
    return sum(len(value) for value in values if type(value) is str or type(value) is bytes)


def contains_ref(value: Any) -> bool:
    """Whether a value is a ref or has one in its plain containers."""
    if isinstance(value, Ref):
        return True
    kind: type = type(value)
    items: Iterable[Any] | None = None
    if kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        items = value
    elif kind is dict:
        items = value.values()
    if items is not None:
        return any(contains_ref(item) for item in items if type(item) not in FLAT)
    return any(contains_ref(getattr(value, name, None)) for name in field_names(value))


def map_refs(value: Any, replace: Callable[[Ref[Any]], Any]) -> Any:
    """Replace each ref in the plain containers of a value; other objects stay the same objects."""
    if isinstance(value, Ref):
        return replace(value)
    if not contains_ref(value):
        return value
    if isinstance(value, dict):
        return {key: map_refs(item, replace) for key, item in value.items()}
    if isinstance(value, list):
        return [map_refs(item, replace) for item in value]
    if isinstance(value, tuple):
        items = [map_refs(item, replace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    fields = {name: map_refs(getattr(value, name), replace) for name in field_names(value)}
    return rebuild_dataclass(type(value), fields)


async def resolved(value: Any) -> Any:
    """Replace each ref in the plain containers of a value by its value."""
    refs: list[Ref[Any]] = []
    map_refs(value, refs.append)
    values = {ref: await ref for ref in refs}
    return map_refs(value, values.__getitem__)


def rebuild_dataclass(cls: type, fields: dict[str, Any]) -> Any:
    """Make an instance from its fields, also of a frozen class, without running `__post_init__` again."""
    instance: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


def field_names(value: Any) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    # `__post_init__` may have set further attributes.
    return [*fields, *(name for name in getattr(value, "__dict__", ()) if name not in fields)]
