"""Classes, functions and other objects of scripts, by value: cloudpickle, with the parts that it leaves out.

A function gets the globals that its script has in the process that it comes to; see `scripts`.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, singledispatch
from types import CodeType, FunctionType, ModuleType, new_class
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from aiodaft._runtime.serialization.scripts import Names, Script, script_of

Place: TypeAlias = tuple[Any, str, int]
Taken: TypeAlias = tuple[Any, dict[str, tuple[int, Any]]]
Fill: TypeAlias = Callable[[Any, Any], object]

# The last two are in the body of a class in a function, and may find names of the class.
_USES: Final = frozenset({
    "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"
})  # fmt: skip
_used: Final[WeakKeyDictionary[CodeType, Sequence[str]]] = WeakKeyDictionary()


def globals_used(code: CodeType) -> Sequence[str]:
    """The names of the globals that code may use, also in functions and classes that it defines; in order."""
    names = _used.get(code)
    if names is None:
        steps = (step for inner in codes_in(code) for step in dis.get_instructions(inner))
        names = _used[code] = sorted({step.argval for step in steps if step.opname in _USES})
    return names


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


_attributes: Final[WeakKeyDictionary[type, Names]] = WeakKeyDictionary()


def same(thing: Any) -> Any:
    return thing


def module_with(namespace: dict[str, Any]) -> ModuleType:
    script = script_of(namespace)
    assert script is not None
    return script.module


def attributes_of(cls: type) -> Names:
    return _attributes.setdefault(cls, Names(at_home=True))


def make_class(make: Callable[..., type], args: tuple[Any, ...]) -> type:
    from cloudpickle import cloudpickle  # noqa: PLC0415 - loaded by then

    before = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
    cls = make(*args)
    if cls is not before:
        _attributes[cls] = Names(at_home=False)
    return cls


def make_struct(
    fields: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
    meta: type,
    name: str,
    bases: tuple[type, ...],
    own: dict[str, Any],
    tracker: str,
    _: object,
) -> type:
    import msgspec  # noqa: PLC0415 - optional package
    from cloudpickle import cloudpickle  # noqa: PLC0415 - loaded by then

    types, defaults, options = fields
    given = {field: msgspec.field(**default) for field, default in defaults.items()}
    cls = new_class(name, bases, {"metaclass": meta, **options}, lambda space: space.update(own, **types, **given))
    found: type = cloudpickle._lookup_class_or_track(tracker, cls)
    return found


def fill_class(cls: type, filling: tuple[Place | None, Fill, Any, dict[str, int]]) -> None:
    """Give a class the attributes, in the process that sent it, that are news to this process."""
    place, fill, (own, slots), numbers = filling
    names = attributes_of(cls)
    news = {name: value for name, value in own.items() if names.take(name, numbers[name])}
    if news:
        fill(cls, (news, slots))
    if place is not None:
        namespace, name, number = place
        _script(namespace).take(name, number, cls)


def make_thing(place: Place | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function or object, empty at first, or the one that is here."""
    found = None if place is None else _script(place[0]).find(*place[1:])
    return make(*args) if found is None else found


def fill_thing(thing: Any, filling: tuple[Place | None, Fill, Any, Taken | None]) -> None:
    """Give a function or object its state in the process that sent it, unless it was here.

    Its script gets the globals that it uses.
    """
    place, fill, state, taken = filling
    if place is None:
        fill(thing, state)
    elif (script := _script(place[0])).find(*place[1:]) is not thing:
        fill(thing, state)
        script.made(*place[1:], thing)
    if taken is not None:
        namespace, names = taken
        for name, (number, value) in names.items():
            _script(namespace).take(name, number, value)


def _script(namespace: dict[str, Any]) -> Script:
    script = script_of(namespace)
    assert script is not None
    return script


def fill_function(function: FunctionType, filling: tuple[Fill, Any]) -> None:
    fill, state = filling
    builtins = function.__globals__["__builtins__"]
    fill(function, state)
    function.__globals__["__builtins__"] = builtins


def make_cached(parameters: dict[str, Any], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return lru_cache(**parameters)(make(*args))


def fill_cached(cached: Any, filling: tuple[Fill | None, Any, dict[str, Any]]) -> None:
    fill, state, own = filling
    if fill is not None:
        fill(cached.__wrapped__, state)
    vars(cached).update(own)


def make_dispatcher(name: str) -> Any:
    def generic(_: object) -> None: ...

    generic.__name__ = name
    return singledispatch(generic)


def fill_dispatcher(dispatcher: Any, filling: tuple[dict[type, Any], dict[str, Any], dict[str, Any]]) -> None:
    functions, own, names = filling
    for cls, function in functions.items():
        dispatcher.register(cls, function)
    vars(dispatcher).update(own)
    for name, value in names.items():
        setattr(dispatcher, name, value)


def fill_object(value: Any, state: Any) -> None:
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for name, part in {**(attributes or {}), **(slots or {})}.items():
        object.__setattr__(value, name, part)
