"""Scripts: modules that other processes cannot import, such as `__main__`, as far as their code has come here.

A process has one set of globals for each script, however its classes and functions come. A name comes with a number,
which grows when the script changes its value. A process takes a name that is new to it, or that the script has changed
since; else the name keeps the value that the code of this process gave it. The process that runs the script takes
nothing: its globals are the script.
"""

from __future__ import annotations

import builtins
import dis
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, singledispatch
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import count
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, new_class
from typing import Any, Final, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

from aiodaft._runtime.platform.linux import when_forked
from aiodaft._runtime.serialization.encoded import is_dense_tensor
from aiodaft.ref import Ref

# multiprocessing runs a script again under the second one.
MAIN: Final = frozenset({"__main__", "__mp_main__"})
# A module has these in itself.
_ABOUT_MODULE: Final = ("__package__", "__name__", "__path__", "__file__")
_ATOMS: Final = frozenset({int, bool, str, bytes, type(None)})
DISPATCHER: Final = cast("FunctionType", singledispatch(len)).__code__
CACHED: Final = type(cache(len))
_THINGS: Final = (type, FunctionType, BuiltinFunctionType, ModuleType, Ref)


class Names:
    def __init__(self, *, at_home: bool) -> None:
        self.at_home = at_home
        # At home with the mark of the value that has the number.
        self._known: dict[str, tuple[int, object]] = {}

    def number(self, name: str, value: Any, mark: Callable[[Any], object]) -> int:
        """The number of a name, a new one if its value was changed at home; see `mark_of`."""
        number, before = self._known.get(name, (0, None))
        if not self.at_home or (found := mark(value)) == before:
            return number
        self._known[name] = next(_changes), found
        return self._known[name][0]

    def take(self, name: str, number: int) -> bool:
        if self.at_home or number <= self._known.get(name, (-1, None))[0]:
            return False
        self._known[name] = number, None
        return True


class Script:
    """The globals of a script in this process, which it is pickled as."""

    def __init__(self, key: bytes, module: ModuleType, *, at_home: bool) -> None:
        self.module = module
        self.namespace = vars(module)
        self._key = key
        self._names = Names(at_home=at_home)
        self._made: dict[str, tuple[int, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        about = {name: self.namespace[name] for name in _ABOUT_MODULE if name in self.namespace}
        return _namespace, (self._key, about)

    def number(self, name: str, mark: Callable[[Any], object]) -> int:
        return self._names.number(name, self.namespace[name], mark)

    def find(self, name: str, number: int) -> Any:
        if self._names.at_home:
            return self.namespace[name] if name in self.namespace and self.number(name, mark_of) == number else None
        known, thing = self._made.get(name, (-1, None))
        return thing if known == number else None

    def take(self, name: str, number: int, value: Any) -> None:
        if self._names.take(name, number) or (not self._names.at_home and name not in self.namespace):
            self.namespace[name] = value

    def made(self, name: str, number: int, thing: Any) -> None:
        if not self._names.at_home:
            self._made[name] = number, thing
            self.take(name, number, thing)


class _Scripts:
    def __init__(self) -> None:
        self.by_key: dict[bytes, Script] = {}
        self.by_namespace: dict[int, Script] = {}
        self.main: ModuleSpec | None = None

    def forget(self) -> None:
        self.by_key.clear()
        self.by_namespace.clear()

    def add(self, key: bytes, module: ModuleType, *, at_home: bool) -> Script:
        script = self.by_key.setdefault(key, Script(key, module, at_home=at_home))
        self.by_namespace[id(script.namespace)] = script
        if self.main is not None and module.__name__ in MAIN:
            script.module.__spec__, self.main = self.main, None
            sys.modules["__main__"] = sys.modules[module.__name__] = script.module
        return script


_scripts: Final = _Scripts()
_changes: Final = count(1)
_tokens: Final[dict[int, tuple[ref[Any], int]]] = {}


def await_main(spec: ModuleSpec) -> None:
    _scripts.main = spec


def script_of(namespace: dict[str, Any]) -> Script | None:
    """The script that has these globals; None for those of a module that other processes can import."""
    script = _scripts.by_namespace.get(id(namespace))
    if script is not None and script.namespace is namespace:
        return script
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if not isinstance(module, ModuleType) or vars(module) is not namespace or can_be_found(module.__name__):
        return None
    # A forked child is a process of its own.
    when_forked(_scripts.forget)
    return _scripts.add(os.urandom(8), module, at_home=True)


def script_named(module: str | None) -> Script | None:
    found = sys.modules.get(module) if isinstance(module, str) else None
    return script_of(vars(found)) if isinstance(found, ModuleType) else None


def _namespace(key: bytes, about: dict[str, Any]) -> dict[str, Any]:
    script = _scripts.by_key.get(key)
    if script is None:
        module = ModuleType(about["__name__"])
        vars(module).update(about, __builtins__=builtins)
        script = _scripts.add(key, module, at_home=False)
    return script.namespace


@cache
def can_be_found(module: str) -> bool:
    try:
        return module not in MAIN and find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def importable(value: Any) -> bool:
    module, name = value.__module__, value.__qualname__
    if module in MAIN:
        return False
    found: Any = sys.modules.get(module)
    # The usual case is the cheap one.
    if "." not in name:
        found = getattr(found, name, None)
    else:
        for part in name.split("."):
            found = getattr(found, part, None)
    return found is value and can_be_found(module)


def mark_of(value: Any, progress: Callable[[int], object] = bool) -> object:
    if isinstance(value, _THINGS) and _parts_of(value) is None:
        return _told(value)
    if type(value) in _ATOMS:
        return type(value), value
    digest = _Digest(progress)
    try:
        _Marker(digest, protocol=5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, RecursionError):
        # It cannot be told.
        return object()
    return digest.hash.digest()


def token_of(thing: Any) -> int:
    known = _tokens.get(id(thing))
    if known is None or known[0]() is not thing:
        key = id(thing)
        known = _tokens[key] = ref(thing, lambda _: _tokens.pop(key, None)), next(_changes)
    return known[1]


class _Digest:
    def __init__(self, progress: Callable[[int], object]) -> None:
        from hashlib import blake2b  # noqa: PLC0415 - slow to import, and few calls need it

        self.hash = blake2b(digest_size=16)
        self._size = 0
        self._progress = progress

    def write(self, data: bytes, /) -> None:
        self.hash.update(data)
        self._size += len(data)
        self._progress(self._size)


class _Marker(pickle.Pickler):
    """Writes a pickle that is never read: it tells a value from others."""

    def reducer_override(self, obj: Any, /) -> Any:
        if is_dense_tensor(obj):
            return str, (f"{token_of(obj)} {obj._version}",)
        if isinstance(obj, type | FunctionType) and importable(obj):
            return NotImplemented
        if isinstance(obj, _THINGS) or goes_by_name(obj):
            return str, (_told(obj),), _parts_of(obj)
        return (str, ("cell",), _content(obj)) if isinstance(obj, CellType) else NotImplemented


def _told(thing: Any) -> str:
    return f"{token_of(thing)} {token_of(thing.__code__)}" if isinstance(thing, FunctionType) else f"{token_of(thing)}"


def _parts_of(thing: Any) -> Any:
    if not isinstance(thing, FunctionType):
        return None
    if thing.__code__ is DISPATCHER:
        return dict(vars(thing)["registry"])
    parts = thing.__defaults__, thing.__kwdefaults__, thing.__closure__, vars(thing)
    return parts if any(parts) else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def goes_by_name(value: Any) -> bool:
    """Whether pickle would tell no more than the name of an object, in a script."""
    return isinstance(value, CACHED) or isinstance(reduced_of(value), str)


def reduced_of(value: Any) -> Any:
    kind: Any = type(value)
    if kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__:
        return NotImplemented
    return value.__reduce_ex__(5) if getattr(value, "__module__", None) in MAIN else NotImplemented


# Classes, functions and other objects of scripts, by value; `code_pickler` pickles them.

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
