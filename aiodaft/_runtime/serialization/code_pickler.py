"""Pickles classes, functions and other objects of scripts by value: cloudpickle, with the parts that it leaves out.

Import it late: cloudpickle is slow to import, and few calls need it.
"""

from __future__ import annotations

import inspect
import io
import sys
from enum import Enum
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import cloudpickle

from aiodaft._runtime.serialization.scripts import (
    CACHED,
    DISPATCHER,
    Script,
    attributes_of,
    fill_cached,
    fill_class,
    fill_dispatcher,
    fill_function,
    fill_object,
    fill_thing,
    globals_used,
    importable,
    make_cached,
    make_class,
    make_dispatcher,
    make_struct,
    make_thing,
    mark_of,
    module_with,
    reduced_of,
    same,
    script_named,
    script_of,
)

_OF_DISPATCHER: Final = frozenset({"register", "dispatch", "registry", "_clear_cache"})
_OF_CACHED: Final = frozenset({"__wrapped__", "cache_parameters"})
_NAMES: Final = ("__name__", "__qualname__", "__module__", "__doc__")
_OF_CLASS: Final = 6

# A script that multiprocessing has run again is no module either.
if (_again := sys.modules.get("__mp_main__")) is not None:
    cloudpickle.register_pickle_by_value(_again)


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # not typed
    def __init__(self, file: Any, protocol: int = 5, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol, buffer_callback)
        self._numbers: dict[tuple[int, str], int] = {}

    def looked_at(self, nbytes: int) -> None:
        """So many bytes of a global were looked at: whether it has changed."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, FunctionType):
            return self._function(obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        if isinstance(obj, CodeType):
            code: Any = self.dispatch_table[CodeType](obj)
            make, args = code
            return make, tuple(obj.co_filename if _is_text(arg, "<dynamic-code>") else arg for arg in args)
        if type(obj) is cached_property:
            # In Python 3.11 it holds a lock, which cloudpickle refuses.
            return cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is CACHED:
            return NotImplemented if importable(obj) else self._cached(obj)
        if type(obj) in self.dispatch_table:
            return NotImplemented
        reduced = reduced_of(obj)
        return self._named(obj, reduced) if isinstance(reduced, str) else reduced

    def _module(self, module: ModuleType) -> Any:
        if (script := script_of(vars(module))) is not None:
            return module_with, (script,)
        if sys.modules.get(module.__name__) is module:
            # Of itself, cloudpickle tries this only with a plain module: torch.backends is none.
            return self.dispatch_table[ModuleType](module)
        return super().reducer_override(module)

    def _class(self, cls: type) -> Any:
        reduced: Any = super().reducer_override(cls)
        match reduced:
            case (make, args, state, None, None, fill):
                if type(cls).__module__.startswith("msgspec"):
                    make, args = make_struct, (_of_struct(cls), *args)
                # Without slots, its instances could not go back to where it is from.
                elif (slots := vars(cls).get("__slots__")) and len(args) == _OF_CLASS:
                    args = *args[:3], {**args[3], "__slots__": slots}, *args[4:]
                place, names = self._place(cls, cls.__qualname__), attributes_of(cls)
                numbers = {name: names.number(name, value, self._mark) for name, value in state[0].items()}
                return make_class, (make, args), (place, fill, state, numbers), None, None, fill_class
        return reduced

    def _function(self, function: FunctionType) -> Any:
        if function.__code__ is DISPATCHER and not importable(function):
            own = {name: value for name, value in vars(function).items() if name not in _OF_DISPATCHER}
            filling = dict(vars(function)["registry"]), own, {name: getattr(function, name) for name in _NAMES}
            return self._made(function, make_dispatcher, (function.__name__,), fill_dispatcher, filling)
        reduced: Any = super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced
        make, (code, base, *args), (attributes, slots), *_, fill = reduced
        there = function.__globals__
        used = {name: there[name] for name in globals_used(code) if name in there}
        script = script_of(there)
        if script is None:
            slots["__globals__"] = used
            return self._made(function, make, (code, base, *args), fill, (attributes, slots))
        slots["__globals__"] = {}
        taken = script, {name: (self._number(script, name), value) for name, value in used.items()}
        state = fill, (attributes, slots)
        return self._made(function, FunctionType, (code, script, *args), fill_function, state, taken=taken)

    def _cached(self, cached: Any) -> Any:
        function = cached.__wrapped__
        reduced = self._function(function) if isinstance(function, FunctionType) else NotImplemented
        if reduced is NotImplemented:
            make, args, fill, state, taken = same, (function,), None, None, None
        else:
            _, (_, make, args), (_, fill, state, taken), *_ = reduced
        own = {name: value for name, value in vars(cached).items() if name not in _OF_CACHED}
        begin = cached.cache_parameters(), make, args
        return self._made(cached, make_cached, begin, fill_cached, (fill, state, own), taken=taken)

    def _named(self, value: Any, name: str) -> Any:
        kind: Any = type(value)
        if isinstance(value, Enum):
            return kind, (value._value_,)
        if kind.__new__ is not object.__new__:
            raise TypeError(
                f"{name} of {value.__module__} has itself pickled as its name, which other processes cannot "
                "import: define it in a module"
            )
        return self._made(value, object.__new__, (kind,), fill_object, value.__getstate__(), name=name)

    def _made(
        self, thing: Any, make: Any, args: Any, fill: Any, state: Any, *, name: str | None = None, taken: Any = None
    ) -> Any:
        """The reduction of an object that the receiving process may have, and makes at most once."""
        place = self._place(thing, name or thing.__qualname__)
        return make_thing, (place, make, args), (place, fill, state, taken), None, None, fill_thing

    def _place(self, thing: Any, name: str) -> Any:
        script = script_named(thing.__module__)
        if script is None or script.namespace.get(name) is not thing:
            return None
        return script, name, self._number(script, name)

    def _mark(self, value: Any) -> object:
        return mark_of(value, self.looked_at)

    def _number(self, script: Script, name: str) -> int:
        number = self._numbers.get((id(script), name))
        if number is None:
            number = script.number(name, self._mark)
            self._numbers[id(script), name] = number
        return number


def _of_struct(cls: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    own, config = inspect.get_annotations(cls), cls.__struct_config__
    fields, values = cls.__struct_fields__, cls.__struct_defaults__
    defaults = {
        name: {"default_factory": value.factory} if hasattr(value, "factory") else {"default": value}
        for name, value in zip(fields[::-1], values[::-1], strict=False)
        if name in own and value is not sys.modules["msgspec"].NODEFAULT
    }
    options = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    renamed = zip(fields, cls.__struct_encode_fields__, strict=True)
    options["rename"] = {name: encoded for name, encoded in renamed if name in own}
    options["kw_only"] = any(name in own for name in fields if name not in cls.__match_args__)
    return {"__annotations__": own}, defaults, options


def pickle_code(thing: Any) -> bytes:
    file = io.BytesIO()
    CodePickler(file).dump(thing)
    return file.getvalue()


def _is_text(value: object, text: str) -> bool:
    # Comparing it with bytes may be an error.
    return isinstance(value, str) and value == text
