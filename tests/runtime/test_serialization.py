"""Every kind of value is encoded and decoded equal, with its type (row DP1)."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import functools
import importlib
import pathlib
import pickle
import sys
import threading
import tracemalloc
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch
from actors import Box
from dtypes import DTYPES, as_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiodaft
from aiodaft._runtime.serialization.code_pickler import pickle_code
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.encoded import tensor_in
from aiodaft._runtime.serialization.encoder import PLAIN as PLAIN_PAYLOAD
from aiodaft._runtime.serialization.encoder import Names, encode
from aiodaft._runtime.serialization.small import SMALL, encode_small


def round_trip(value: Any) -> Any:
    """Encode and decode without any process."""
    encoded = encode(value, names=Names("value"))
    blob = encoded.packed()
    return decode(encoded.payload, [] if blob is None else [memoryview(bytearray(blob))])


class Color(enum.Enum):
    """An enumeration."""

    RED = 1
    GREEN = "green"


class Level(enum.IntEnum):
    """Looks like an integer, and is none."""

    LOW = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass."""

    name: str
    sizes: tuple[int, ...]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Text(str):
    """A subclass of a builtin."""

    __slots__ = ()


Point = namedtuple("Point", "x y")


class Mode(enum.Flag):
    """Members can be combined."""

    READ = 1
    WRITE = 2


class Stack(list[Any]):
    """A subclass of a container."""


@dataclasses.dataclass
class Pair:
    """Two parts, and perhaps more attributes."""

    left: Any
    right: Any = None


@dataclasses.dataclass
class Masked(Pair):
    """Chooses itself the part that is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"left": self.left, "right": "masked"}


@dataclasses.dataclass(slots=True)
class Slotted:
    """Has no `__dict__`."""

    left: Any


PLAIN: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, 2**64 - 1, 2**64, -(2**63), -(2**200), 0.0, -0.0, 1e308, float("inf"),
    "", "ä€🙂", "\ud800", b"", b"\x00\xff", bytearray(b"mutable"), (), (1,), ((1, 2), [3]), [], [[[]]], {}, {1: 2},
    {(1, "a"): [None]}, {None: 1, True: 2.5}, set(), {1, 2}, frozenset({(1, 2)}), complex(1, -2), range(3, 9, 2),
    slice(1, None, 2), Ellipsis, int, Color.RED, Level.LOW, Config("a", (1, 2), {"k": [1]}), Point(1, (2,)), Text("s"),
    decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime(2026, 1, 2, tzinfo=UTC), pathlib.PurePosixPath("/a/b"),
    OrderedDict([(2, 1), (1, 2)]), defaultdict(list, {1: [2]}), deque([1, 2], maxlen=3), types.SimpleNamespace(a=1),
]  # fmt: skip


SMALL_VALUES = [
    *PLAIN[: PLAIN.index(bytearray(b"mutable"))], b"x" * 60_000, [1, "a", None], ((1, 2), [3]), {"a": {"b": (True, 1)}},
    [True, 1, 1.0], Color.RED, Level.LOW, Mode.READ, Config("a", (1, 2), {"k": [1]}), [Pair(1, Pair([2], Color.GREEN))],
    {1: 2, True + 1: 3, None: [2**70]}, [()], [[]] * 1, {1, (2, 3)}, frozenset(), Pair, int, dataclasses.replace,
]  # fmt: skip
_twice: list[Any] = [1]
FULL_VALUES = [
    b"x" * 70_000, "x" * 70_000, list(range(65)), [[]] * 65, [_twice, _twice], Pair(_twice, _twice), {(1,): 2},
    Stack([1]), [Stack()], OrderedDict(a=1), Mode.READ | Mode.WRITE, Masked(1, 2), Slotted(1), Point(1, 2), Text("s"),
    [b"x" * 40_000] * 2, types.SimpleNamespace(a=1), np.array(["text"]), np.zeros((3, 3)).T[1:], np.zeros(0),
    np.zeros(2, ">f4"), torch.zeros(0), torch.zeros(20_000), torch.ones(4, 3).t(), torch.ones(2, requires_grad=True),
    torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse(),
    torch.ones(2, dtype=torch.complex64),
]  # fmt: skip


def is_small(value: Any) -> bool:
    """Whether a value goes without pickle and buffers."""
    return encode(value, names=Names("value")).payload[0] == SMALL


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, torch.Tensor):
        return torch.equal(one.to_dense(), other.to_dense()) and one.dtype == other.dtype
    return bool(one == other)


@pytest.mark.parametrize("value", SMALL_VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_small_values_go_as_they_are(value: Any) -> None:
    assert is_small(value)
    got = round_trip([value])[0]
    assert got == value
    assert type(got) is type(value)
    assert repr(got) == repr(value)


@pytest.mark.parametrize("value", FULL_VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_large_and_odd_values_take_the_way_of_the_encoder(value: Any) -> None:
    assert not is_small(value)
    got = round_trip(value)
    assert type(got) is type(value)
    assert same(got, Masked(1, "masked") if type(value) is Masked else value)


def test_a_small_dataclass_is_its_attributes() -> None:
    pair = Pair(1)
    pair.extra = [2]  # type: ignore[attr-defined]
    assert is_small(pair)
    got = round_trip(pair)
    assert vars(got) == {"left": 1, "right": None, "extra": [2]}
    assert got.extra is not pair.extra  # type: ignore[attr-defined]


def test_a_class_that_its_name_does_not_lead_to_any_more_is_no_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Pair(1)
    assert is_small(old)
    monkeypatch.setattr(sys.modules[__name__], "Pair", dataclasses.make_dataclass("Pair", ["left"]))
    assert not is_small(old)


def test_a_dataclass_that_gets_a_hook_of_pickle_is_no_small_one_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_small(Pair(1))
    monkeypatch.setattr(Pair, "__getstate__", Masked.__getstate__, raising=False)
    assert not is_small(Pair(1))
    assert round_trip(Pair(1)).right == "masked"


@pytest.mark.parametrize("place", ["alone", "list", "dict", "key", "dataclass"])
@pytest.mark.parametrize("text", ["x" * 10_000_000, b"x" * 10_000_000], ids=["str", "bytes"])
def test_long_text_is_refused_before_it_is_copied(text: Any, place: str) -> None:
    value = {"alone": text, "list": [1, text], "dict": {"a": text}, "key": {text: 1}, "dataclass": Pair([text])}[place]
    tracemalloc.start()
    try:
        assert encode_small((value,), by_name=False) is None
        assert tracemalloc.get_traced_memory()[1] < len(text) // 10
    finally:
        tracemalloc.stop()


def test_what_was_found_not_to_be_small_is_not_tried_again() -> None:
    assert encode([1], names=Names("value")).payload[0] == SMALL
    assert encode([1], names=Names("value"), small=False).payload[0] == PLAIN_PAYLOAD


def test_objects_that_are_there_twice_stay_one_object_in_a_dataclass() -> None:
    shared = [1]
    got = round_trip(Pair(shared, [shared]))
    assert got.left is got.right[0]
    cyclic = Pair(1, [])
    cyclic.right.append(cyclic)
    got = round_trip(cyclic)
    assert got.right[0] is got


def test_an_array_stays_read_only() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert not round_trip(array).flags.writeable


@pytest.mark.parametrize("length", [3, 30_000])
def test_a_tensor_with_freed_memory_cannot_travel(length: int) -> None:
    freed = torch.ones(length)
    freed.untyped_storage().resize_(0)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="memory of this tensor was freed"):
        round_trip([freed])


def test_decoding_waits_for_a_module_that_another_thread_imports(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import sys, threading, dataclasses\n"
        "if gate := sys.modules.get('gate'): gate.begun.set(); gate.go.wait()\n"
        "@dataclasses.dataclass\nclass Late:\n    x: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    payload = encode(importlib.import_module("slow_module").Late(1), names=Names("value")).payload
    del sys.modules["slow_module"]
    gate: Any = types.ModuleType("gate")
    gate.begun, gate.go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate", gate)
    thread = threading.Thread(target=importlib.import_module, args=("slow_module",))
    thread.start()
    gate.begun.wait()
    gate.go.set()
    assert decode(payload).x == 1
    thread.join()
    monkeypatch.delitem(sys.modules, "slow_module")


def test_small_tensors_and_arrays() -> None:
    small = torch.arange(6.0).reshape(2, 3)
    values: tuple[Any, ...] = (
        *(torch.ones(3).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float64)),
        small, small[1:], torch.tensor(2.5), np.arange(6).reshape(2, 3), np.array(1.5), np.ones(3, "c8"),
        np.array([True]),
    )  # fmt: skip
    for value in values:
        assert is_small([value])
        got = round_trip({"it": value})["it"]
        assert same(got, value)
        assert got.shape == value.shape
        got[...] = 0
        assert not same(got, value)
    assert not is_small([small, small])
    assert not is_small([small[:1], small[1:]])


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_a_value_arrives_equal_and_with_its_type(value: Any) -> None:
    got = round_trip([value, {"again": value}])
    assert got == [value, {"again": value}]
    assert type(got[0]) is type(value)
    assert str(round_trip(-0.0)) == "-0.0"


def test_nan_and_cycles_survive() -> None:
    assert str(round_trip(float("nan"))) == "nan"
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    got = round_trip(cyclic)
    assert got[1] is got
    deep: Any = "bottom"
    for _ in range(300):
        deep = [deep]
    assert round_trip(deep) == deep


def test_long_containers_are_encoded_in_pieces() -> None:
    for value in (
        list(range(120_000)),
        {index: (index,) for index in range(60_000)},
        [{"a": index} for index in range(60_000)],
        [Point(index, str(index)) for index in range(60_000)],
    ):
        assert round_trip(value) == value


def test_large_buffers_keep_their_types() -> None:
    for value in (b"x" * 5_000_000, bytearray(b"y" * 3_000_000)):
        got = round_trip({"deep": [value]})["deep"][0]
        assert got == value
        assert type(got) is type(value)


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=50_000)
)
_hashable = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.tuples(inner, inner)
        | st.dictionaries(_hashable, inner, max_size=6)
        | st.sets(_hashable, max_size=6)
        | st.builds(Point, inner, inner)
        | st.builds(Box, inner).map(lambda box: box.ref)
    ),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(_values)
def test_any_nesting_arrives_equal(value: Any) -> None:
    got = round_trip(value)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, see tests/gpu")
def test_a_tensor_of_a_gpu_that_came_through_host_memory_stays_there_without_one() -> None:
    for size in (0, 3):
        spec = [0, "float32", [size], [1], 0, 0, "cuda"]
        tensor = tensor_in(torch.ones(size).view(torch.uint8), spec)
        assert torch.equal(tensor, torch.ones(size))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_shape(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (1,), (3, 5), (2, 0, 4), (4, 3, 2)):
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        for value in (
            tensor,
            tensor.T if tensor.dim() == 2 else tensor,
            tensor[1:] if tensor.dim() and len(tensor) else tensor,
        ):
            got = round_trip({"t": value})["t"]
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            if value.numel():
                assert as_bytes(got) == as_bytes(value)


STRIDED = {
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(50, x.shape[1]),
    "diagonal": lambda x: x.diagonal(),
    "channels last": lambda x: x.reshape(1, 2, 5, 9).to(memory_format=torch.channels_last),
    "narrow": lambda x: x.narrow(0, 3, 2),
    "permuted": lambda x: x.reshape(2, 5, 9).permute(2, 0, 1),
}


@pytest.mark.parametrize("how", STRIDED)
def test_any_strides(how: str) -> None:
    value = STRIDED[how](torch.arange(90, dtype=torch.float32).reshape(10, 9))
    got = round_trip(value)
    assert torch.equal(got, value)
    encoded = encode(value, names=Names("x"))
    assert encoded.nbytes <= max(value.numel() * 4, 64)
    if how in ("transposed", "channels last", "permuted", "expanded"):
        assert got.stride() == value.stride()


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    base = torch.arange(100.0)
    first, second, whole = round_trip([base[:60], base[40:], base])
    first[50] = -1.0
    assert second[10] == -1.0
    assert whole[50] == -1.0
    tied = torch.nn.Linear(4, 4)
    got = round_trip({"a": tied.weight, "b": tied.weight, "module": tied})
    assert got["a"] is got["b"]
    assert got["module"].weight is got["a"]


def test_two_slices_far_apart_do_not_send_what_is_between_them() -> None:
    base = torch.zeros(1_000_000)
    encoded = encode([base[:10], base[-10:]], names=Names("x"))
    assert encoded.nbytes < 1000


def test_two_tensors_of_one_storage_are_two_objects() -> None:
    base = torch.zeros(16, dtype=torch.uint8)
    one, other = round_trip([base, base.view(-1)])
    assert one is not other
    one[0] = 1
    assert other[0] == 1


def test_views_with_different_dtypes_share_memory() -> None:
    base = torch.zeros(16, dtype=torch.uint8)
    got = round_trip([base, base[8:].view(torch.float32)])
    got[1][0] = 1.0
    assert got[0][8:12].tolist() == [0, 0, 128, 63]


def test_gradients_parameters_and_lazy_bits() -> None:
    leaf = torch.ones(2, requires_grad=True)
    got = round_trip([leaf, leaf * 2, torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.nn.Parameter(leaf)])
    assert [tensor.requires_grad for tensor in got] == [True, True, False, True]
    assert type(got[2]) is torch.nn.Parameter
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    assert torch.equal(round_trip(z.conj()), z.conj())
    assert torch.equal(round_trip(z.conj().imag), z.conj().imag)


def test_sparse_tensors_and_modules() -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(round_trip(sparse).to_dense(), torch.eye(4))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    got = round_trip(module)
    x = torch.randn(5, 3)
    assert torch.equal(got(x), module(x))


def test_a_storage_says_that_it_cannot_travel() -> None:
    value = torch.ones(3).untyped_storage()
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"args\[0\] .*pass a tensor that uses it"):
        encode([value], names=Names("Model.execute", (("args[0]", value),)))


def test_a_tensor_without_data_says_that_it_cannot_travel() -> None:
    value = torch.empty(3, device="meta")
    with pytest.raises(
        aiodaft.exceptions.SerializationError, match=r"args\[0\] of Model.execute cannot travel: a meta"
    ):
        encode([value], names=Names("Model.execute", (("args[0]", value),)))


def test_numpy_arrays() -> None:
    structured = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    for array in (
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20_000)[::2],
        np.zeros((2, 0)),
        np.array("text"),
        np.array([None, {"a": 1}], dtype=object),
        structured,
        np.float32(1.5),
        np.array([1 + 2j], dtype=np.complex64),
    ):
        got = round_trip({"a": array})["a"]
        assert np.array_equal(got, array)
        assert got.dtype == array.dtype
        if isinstance(got, np.ndarray) and not array.dtype.hasobject:
            assert got.flags.writeable


def test_a_class_with_a_cached_property_travels() -> None:
    class Lazy:
        @functools.cached_property
        def cached(self) -> object:
            """Made once."""
            return object()

    # A process that has sent a class takes it back as it is: so its property goes by itself, too.
    assert round_trip(Lazy) is Lazy
    Lazy.cached = copied = round_trip(vars(Lazy)["cached"])  # type: ignore[method-assign]
    assert isinstance(copied, functools.cached_property)
    assert copied.__doc__ == "Made once."
    lazy = Lazy()
    assert lazy.cached is lazy.cached


def test_code_that_uses_a_module_of_a_class_of_its_own_travels() -> None:
    def set_up() -> object:
        return torch.backends.cuda, torch.backends.cudnn

    assert type(torch.backends.cudnn) is not type(torch)
    assert isinstance(set_up, types.FunctionType)
    copied = pickle.loads(pickle_code(set_up))
    assert copied is not set_up
    assert copied() == (torch.backends.cuda, torch.backends.cudnn)
    assert round_trip(torch.backends.cudnn) is torch.backends.cudnn


def test_functions_classes_and_closures() -> None:
    factor = 3

    def scale(x: int) -> int:
        return x * factor

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    assert round_trip(scale)(5) == 15
    assert round_trip(lambda x: x + factor)(1) == 4
    assert round_trip(Local(3)).value == 3
    assert round_trip(len) is len
    assert round_trip(Config) is Config


def size_of(value: Any) -> int:
    return encode(value, names=Names("value")).size


def test_a_slice_of_arrow_costs_its_rows() -> None:
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "x": list(range(5000)),
        "text": [f"the number {x}" for x in range(5000)],
        "parts": [[x] for x in range(5000)],
    }
    table = arrow.table({**columns, "none": [None] * 5000, "kind": arrow.array(["a", "b"] * 2500).dictionary_encode()})
    for whole in (table, table.to_batches()[0], table["text"], table["parts"].chunk(0)):
        part = whole.slice(4000, 10)
        assert round_trip(part).equals(part)
        assert round_trip(whole).equals(whole)
        assert size_of(part) < 5000 < size_of(whole)


def test_frames_of_polars_are_as_arrow_has_them() -> None:
    pytest.importorskip("pyarrow")
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {"x": range(5000), "text": [f"a text that is not short, of the number {x}" for x in range(5000)]},
        schema_overrides={"x": polars.Int16},
    )
    for whole in (frame, frame["text"]):
        assert round_trip(whole).equals(whole)
        part = whole.slice(4000, 10)
        assert round_trip(part).equals(part)
        assert size_of(part) < 5000 < size_of(whole)
    # Numbers are not pickled, but lie in memory as they are.
    assert len(encode(frame["x"], names=Names("value")).payload) < 2000
    # Types that arrow does not have stay as they are.
    for dtype in (polars.Enum(["a", "b"]), polars.Categorical, polars.Int128):
        odd = polars.Series("odd", [1 if dtype == polars.Int128 else "a", None], dtype=dtype)
        assert (round_trip(odd).dtype, round_trip(odd).name) == (dtype, "odd")
