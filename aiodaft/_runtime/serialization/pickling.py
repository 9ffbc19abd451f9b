"""Pickle without tensors, refs and large buffers, and cloudpickle for objects that pickle refuses."""

from __future__ import annotations

import ast
import importlib
import io
import pickle
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from itertools import islice
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final, NamedTuple, Protocol, cast

from aiodaft._runtime.process import Process, current_process, refuses_pickle
from aiodaft._runtime.serialization.containers import Parts, bare_error, fill_error, is_made_of_parts, parts_of_error
from aiodaft._runtime.serialization.encoded import Source, is_dense_tensor
from aiodaft._runtime.serialization.scripts import CACHED, MAIN, importable, reduced_of
from aiodaft.actor import Actor, Handle, target_of
from aiodaft.ref import Ref, Refs, parts_of

# The frames of a traceback as plain data, and a traceback made of them that shows the same lines, without variables.
# Tracebacks, debuggers and notebooks find the source of a frame by its file, the first line of its code and the
# position in it.

_NOWHERE: Final = -1
# The name of the only variable of a frame: Python, which looks for names like an unknown one, finds none like this.
_STOP: Final = "..."


class FrameData(NamedTuple):
    file: str
    function: str
    module: str
    first_line: int
    line: int
    end_line: int
    column: int
    end_column: int


class _Raised(Exception):
    """Ends the code of a frame."""


def frames_of(entry: TracebackType | None) -> list[FrameData]:
    found: list[FrameData] = []
    while entry is not None:
        code, line = entry.tb_frame.f_code, entry.tb_lineno or 0
        module, first = str(entry.tb_frame.f_globals.get("__name__")), min(code.co_firstlineno, line)
        ends = _ends(code, entry.tb_lasti, line)
        found.append(FrameData(code.co_filename, code.co_name, module, first, line, *ends))
        entry = entry.tb_next
    return found


def _ends(code: CodeType, instruction: int, line: int) -> tuple[int, int, int]:
    start, end, column, end_column = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if start != line or end is None or column is None or end_column is None:
        return line, _NOWHERE, _NOWHERE
    return end, column, end_column


def gap(left_out: int) -> FrameData:
    return FrameData("...", f"<{left_out} frames left out>", "", 0, 0, 0, _NOWHERE, _NOWHERE)


def traceback_of(frames: list[FrameData]) -> TracebackType | None:
    # The caller of a generator is forgotten. Else the frames would lead to the receiver of the error: a cycle.
    return next(_made_of(frames))


def _made_of(frames: list[FrameData]) -> Generator[TracebackType | None]:
    made: TracebackType | None = None
    entry: TracebackType | None = None
    try:
        for frame in reversed(frames):
            try:
                exec(_code(frame), {"__name__": frame.module, _STOP: _Raised})
            except _Raised as raised:
                entry = raised.__traceback__
            # The first entry is that of this function.
            assert entry is not None
            assert entry.tb_next is not None
            entry.tb_next.tb_next = made
            made = entry.tb_next
        yield made
    finally:
        # Break the circle: the frames that are made refer to this one.
        del made, entry


@lru_cache(256)
def _code(frame: FrameData) -> CodeType:
    lines = frame.line - frame.first_line + 1, frame.end_line - frame.first_line + 1
    at = {"lineno": lines[0], "end_lineno": lines[1], "col_offset": frame.column, "end_col_offset": frame.end_column}
    statement = ast.Raise(exc=ast.Name(_STOP, ast.Load(), **at), cause=None, **at)
    code = compile(ast.Module([statement], []), frame.file, "exec")
    return code.replace(co_name=frame.function, co_firstlineno=frame.first_line)


# Smaller out-of-band buffers cost more than they save.
_SMALL_BUFFER: Final = 4 << 10

_OUTERMOST: Final = 20
_INNERMOST: Final = 80

_decoding = threading.local()


class TooLong(Exception):
    """A value is larger than its limit."""


def yield_gil() -> None:
    """In a helper thread: give the interpreter to the loop."""
    time.sleep(0.0002)  # noqa: TID251 - a thread of its own


class NeedsCloudpickle(Exception):
    """A function or class that the receiver cannot import by name."""


# The modules of the classes of arrow and polars.
_FRAMES: Final = ("pyarrow.lib", "polars.dataframe.frame", "polars.series.series")
_FILES: Final = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class OfProcess(Protocol):
    @property
    def process(self) -> Process: ...


class Aside(Protocol):
    limit: int | None
    sources: list[Source]
    refs: list[Any]

    def add_source(self, buffer: Any) -> int: ...

    def add_tensor(self, tensor: Any) -> int: ...

    def add_ref(self, ref: Any) -> int: ...

    def check_home(self, owned: OfProcess, what: object, instead: str) -> None: ...


def _reduce(aside: Aside, value: Any, *, by_value: bool) -> Any:
    kind = type(value)
    if is_dense_tensor(value):
        return _load_tensor, (aside.add_tensor(value),)
    if isinstance(value, Ref):
        parts = parts_of(value)
        return (_load_ref, (aside.add_ref(value),)) if parts is None else (_load_gathered, parts)
    if kind is Handle:
        aside.check_home(cast("OfProcess", target_of(value)), value, "pass a handle of this one, or a value")
    if isinstance(value, BaseException | TracebackType):
        return _reduce_error(value)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy" and not value.dtype.hasobject:
        return _reduce_array(value)
    if kind.__module__.startswith(_FRAMES):
        return _reduce_frame(kind, value)
    if isinstance(value, Actor):
        raise TypeError(
            f"an instance of {kind.__name__} stays in its process: pass the handle that spawn gave, or in its own "
            "methods that of `aiodaft.current_actor()`"
        )
    if kind.__name__ == "UntypedStorage" and kind.__module__ == "torch.storage":
        # torch pickles it, and cannot unpickle the result.
        raise TypeError("a storage cannot travel: pass a tensor that uses it")
    if isinstance(value, _FILES):
        raise TypeError(f"the open file {getattr(value, 'name', value)!r} stays in its process: pass its path")
    if not by_value and _needs_code(kind, value):
        raise NeedsCloudpickle
    return NotImplemented


def _check_length(nbytes: int, limit: int | None) -> None:
    if limit is not None and nbytes > limit:
        raise TooLong


class _Sink(io.RawIOBase):
    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: Any, /) -> int:
        self._parts.append(bytes(data))
        self._size += len(data)
        _check_length(self._size, self._limit)
        return len(data)

    def getvalue(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


def _needs_code(kind: type, value: Any) -> bool:
    if isinstance(value, type | FunctionType) or kind is CACHED:
        return not importable(value)
    return kind.__module__ in MAIN or isinstance(reduced_of(value), str)


class _Pickler(pickle.Pickler):
    def __init__(self, sink: _Sink, aside: Aside, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(sink, protocol=5, buffer_callback=buffer_callback)
        self._aside = aside

    def reducer_override(self, obj: Any, /) -> Any:
        return _reduce(self._aside, obj, by_value=False)


class _Dumper(Protocol):
    def dump(self, value: Any, /) -> None: ...


@cache
def _cloud_pickler() -> Callable[..., _Dumper]:
    from aiodaft._runtime.serialization.code_pickler import CodePickler  # noqa: PLC0415 - slow to import

    class CloudPickler(CodePickler):
        def __init__(self, sink: _Sink, aside: Aside, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
            super().__init__(sink, buffer_callback=buffer_callback)
            self._aside = aside

        def looked_at(self, nbytes: int) -> None:
            _check_length(nbytes, self._aside.limit)

        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce(self._aside, obj, by_value=True)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return CloudPickler


def pickle_into(aside: Aside, value: Any) -> bytes:
    """Pickle a value without its large buffers, tensors and refs, which `aside` takes.

    Raises:
        TypeError: The process refuses pickle.
    """
    if refuses_pickle():
        raise TypeError(f'{_why_pickled(aside, value)}, and Runtime(codec="msgpack") refuses pickle')
    sources, refs = len(aside.sources), len(aside.refs)
    try:
        return _dump(_Pickler, aside, value)
    except (NeedsCloudpickle, pickle.PicklingError, AttributeError, TypeError):
        # The second attempt puts the same parts aside.
        del aside.sources[sources:], aside.refs[refs:]
    return _dump(_cloud_pickler(), aside, value)


def _why_pickled(aside: Aside, value: Any) -> str:
    try:
        _reduce(aside, value, by_value=False)
    except NeedsCloudpickle:
        return f"other processes cannot import {value.__module__}.{value.__qualname__} by its name"
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__} is neither plain data nor built from it"


def _dump(make: Callable[..., _Dumper], aside: Aside, value: Any) -> bytes:
    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BUFFER:
            return True
        aside.add_source(raw)
        return False

    sink = _Sink(aside.limit)
    make(sink, aside, keep_in_band).dump(value)
    return sink.getvalue()


class Context(Protocol):
    @property
    def home(self) -> Process | None: ...

    def tensor(self, index: int) -> Any: ...

    def ref(self, index: int) -> Any: ...


def check_pickle() -> None:
    if refuses_pickle():
        raise TypeError('it has a pickle, which Runtime(codec="msgpack") refuses')


def unpickle(data: Any, buffers: list[memoryview], context: Context, pause: Callable[[], None] | None = None) -> Any:
    check_pickle()
    with decoding_in(context):
        if pause is None:
            return pickle.loads(data, buffers=buffers)
        return pickle.Unpickler(_Tap(data, pause), buffers=buffers).load()


@contextmanager
def decoding_in(context: Context) -> Generator[None]:
    outer = getattr(_decoding, "context", None)
    _decoding.context = context
    try:
        yield
    finally:
        _decoding.context = outer


class _Tap(io.RawIOBase):
    def __init__(self, data: Any, pause: Callable[[], None]) -> None:
        self._buffer = io.BytesIO(data)
        self._pause = pause

    def read(self, size: int = -1, /) -> bytes:
        self._pause()
        return self._buffer.read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._buffer.readline(size)

    def readinto(self, target: Any, /) -> int:
        return self._buffer.readinto(target)


def _load_tensor(index: int) -> Any:
    return _decoding.context.tensor(index)


def _load_ref(index: int) -> Any:
    return _decoding.context.ref(index)


def _load_gathered(*parts: Ref[Any]) -> Ref[list[Any]]:
    return Refs(parts).gather()


def home() -> Process:
    """The process that unpickles a value; outside of the runtime's own unpickling, the current process.

    This is how handles and channels find their process: unpickling has no arguments of its own.
    """
    found = getattr(getattr(_decoding, "context", None), "home", None)
    return current_process() if found is None else found


def _reduce_error(value: BaseException | TracebackType) -> Any:
    if isinstance(value, TracebackType):
        return _reduce_traceback(value)
    if not is_made_of_parts(type(value)):
        from tblib import pickling_support  # noqa: PLC0415 - few errors need it

        return pickling_support.pickle_exception(value)
    parts = parts_of_error(value)
    context = value.__cause__, value.__traceback__, value.__context__, value.__suppress_context__
    # The attributes of an error may lead back to it, so they come after it; but for the members of a group.
    made_of = (value.message, value.exceptions) if isinstance(value, BaseExceptionGroup) else ()
    return bare_error, (type(value), made_of), (tuple(parts), *context), None, None, _fill_error


def _fill_error(error: BaseException, filling: tuple[Any, ...]) -> None:
    (args, state, fields), cause, frames, context, suppressed = filling
    fill_error(error, Parts(args, state, fields))
    if state and type(error).__setstate__ is not BaseException.__setstate__:
        error.__setstate__(state)
    for name, value in {"__cause__": cause, "__context__": context, "__suppress_context__": suppressed}.items():
        BaseException.__dict__[name].__set__(error, value)
    BaseException.with_traceback(error, frames)


def _reduce_traceback(value: TracebackType) -> Any:
    if getattr(sys, "tracebacklimit", None) == 0:
        # As where Python prints it. Simulations say so, because paths differ from machine to machine.
        return _no_frames, ()
    frames = frames_of(value)
    left_out = len(frames) - _OUTERMOST - _INNERMOST
    if left_out > 0:
        frames[_OUTERMOST:-_INNERMOST] = [gap(left_out)]
    return traceback_of, (frames,)


def _no_frames() -> None: ...


def _reduce_array(array: Any) -> Any:
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy()
    return array.__reduce_ex__(5)


def _reduce_frame(kind: type, value: Any) -> Any:
    """Of arrow, a slice without the rows around it; of polars, frames and series as arrow has them."""
    if kind.__name__ == "Series":
        return _load_series, (value.to_frame(),)
    if kind.__name__ == "DataFrame":
        with suppress(Exception):
            # A view of text refers to all text of its frame: the rows of a slice alone take other types.
            newest = sys.modules["polars"].CompatLevel.newest()
            table = value.to_arrow(compat_level=newest)
            if table.nbytes > 2 * value.estimated_size() + _SMALL_BUFFER:
                table = value.to_arrow()
            # Some types are not the same in arrow, or not known there.
            if _load_frame(table).schema == value.schema and len(table) == len(value):
                return _load_frame, (table,)
    elif hasattr(value, "offset") and 2 * value.nbytes < value.get_total_buffer_size():
        return sys.modules["pyarrow"].concat_arrays([value]).__reduce__()
    return NotImplemented


def _load_frame(table: Any) -> Any:
    return importlib.import_module("polars").from_arrow(table, rechunk=False)


def _load_series(frame: Any) -> Any:
    return frame.to_series()
