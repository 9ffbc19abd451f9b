"""`Runtime(codec="msgpack")`: no process pickles or unpickles, and refused values are named."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from datetime import date
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from inside import peer_of
from odd_errors import BUILTIN, ODD, facts_of
from plain_actors import Box, Color, OwnError, Pickled, Point, Settings, Worker

import aiodaft
from aiodaft._protocol.connections.codec import pack, pack_exts
from aiodaft._runtime.serialization import pickling
from aiodaft._runtime.serialization import small as codes
from aiodaft._runtime.serialization.decoder import decode
from aiodaft._runtime.serialization.definitions import Definition, find
from aiodaft._runtime.serialization.encoder import PLAIN
from aiodaft.exceptions import RemoteError, SerializationError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime(codec="msgpack", preload=()) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(plain: aiodaft.Runtime) -> AsyncIterator[Worker]:
    async with plain.spawn(Worker) as handle:
        yield handle


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's runtime and worker go on; `nothing_left_at_the_end` looks at the rest that they leave."""


VALUES: list[Any] = [
    None, 2**200, 1.5, "text", b"bytes", bytearray(b"mutable"), [1, [2, (3,)]], {"a": {1, 2}, 3: frozenset({4})},
    Color.BLUE, Point(1, 2.5), Box("a", (Point(0, 0),), Box("b")), Settings(0.5, ["x"]), Point, Color,
    ValueError("text", 3), [Point(number, 0) for number in range(100)], ["x" * 20_000, b"y" * 100_000],
    {str(number): Box("b") for number in range(200)}, list(range(30_000)),
    {number: [number] for number in range(20_000)},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_plain_values_and_what_is_built_from_them_travel(worker: Worker, value: Any) -> None:
    came = await worker.same(value)
    assert type(came) is type(value)
    assert repr(came) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5), np.zeros((0, 3)), np.ones((300, 200), order="F"), np.arange(100_000).reshape(10, -1)[:, ::2],
        np.array(["2026-01-01"], "M8[s]"), np.arange(9, dtype=">i4"),
    ],
    ids=str,
)  # fmt: skip
async def test_arrays_travel(worker: Worker, array: np.ndarray[Any, Any]) -> None:
    came = await worker.same([array, "text"])
    assert came[0].dtype == array.dtype
    assert came[0].shape == array.shape
    assert (came[0] == array).all()


async def test_tensors_travel(worker: Worker) -> None:
    value = {"small": torch.arange(4), "large": torch.randn(300, 300), "half": torch.ones(2, dtype=torch.bfloat16)}
    came = await worker.same(value)
    assert all(torch.equal(came[name], tensor) for name, tensor in value.items())


async def test_handles_groups_channels_refs_and_streams_work(plain: aiodaft.Runtime, worker: Worker) -> None:
    async with plain.group(2, Worker) as others:
        assert await worker.ask(others[0], [1]) == [1]
        came = await worker.same(others)
        assert await came.all(Worker.same, 3) == [3, 3]
    channel = aiodaft.Channel[Any](capacity=2)
    done = worker.fill(channel, [Point(1, 2), "x" * 100_000, [Color.RED]])
    assert [await channel.recv() for _ in range(3)] == [Point(1, 2), "x" * 100_000, [Color.RED]]
    await done
    assert await worker.same(worker.same(Box("a"))) == Box("a")
    (inside,) = await worker.same([worker.same(Point(5, 6))])
    assert inside == Point(5, 6)
    assert [item async for item in worker.count(3)] == [Point(0, 0), Point(1, 0), Point(2, 0)]


async def test_a_compiled_graph_runs(worker: Worker) -> None:
    graph = aiodaft.compile(lambda x: worker.same([worker.same(x), Point(1, 2)]))
    async with graph:
        assert await graph(Box("a")) == [Box("a"), Point(1, 2)]


async def test_an_exception_comes_as_its_own_type_with_its_cause_and_its_frames_as_text(worker: Worker) -> None:
    with pytest.raises(OwnError) as raised:
        await worker.fail()
    assert (raised.value.args, raised.value.code) == (("it failed", 7), 7)
    assert isinstance(raised.value.__cause__, KeyError)
    assert any("the remote traceback" in note and "in fail" in note for note in raised.value.__notes__)


async def test_exceptions_of_all_classes_come_with_all_that_they_have(worker: Worker) -> None:
    errors = [*BUILTIN, *ODD]
    assert list(map(facts_of, await worker.same(errors))) == list(map(facts_of, errors))


async def test_an_exception_that_needs_pickle_comes_as_text(worker: Worker) -> None:
    with pytest.raises(RemoteError, match=r"plain_actors.StrangeError: strange") as raised:
        await worker.fail_strangely()
    assert any("refuses pickle" in note for note in raised.value.__notes__)


# Refused values.


class Here:
    """Of a module that workers cannot import."""


@pytest.mark.parametrize(
    "value",
    [Pickled(), date(2026, 1, 1), 1j, np.float64(1), lambda: None, range(3)],
    ids=lambda value: type(value).__name__,
)
async def test_f87_what_would_be_pickled_is_refused_at_the_call_with_the_path_to_it(worker: Worker, value: Any) -> None:
    with pytest.raises(
        SerializationError, match=r"args\[0\]\['key'\]\[1\] of Worker.same cannot travel.*refuses pickle"
    ):
        await worker.same({"key": [1, value]})


async def test_a_result_that_would_be_pickled_is_refused_by_the_actor(worker: Worker) -> None:
    with pytest.raises(SerializationError, match=r"result of Worker.pickled cannot travel: a plain_actors.Pickled"):
        await worker.pickled()
    assert await worker.same(1) == 1


async def test_a_class_that_would_be_sent_as_code_is_refused(plain: aiodaft.Runtime, worker: Worker) -> None:
    class Local(aiodaft.Actor):
        pass

    async def spawned() -> None:
        await plain.spawn(Local)

    for use in (lambda: worker.same(Local), spawned):
        with pytest.raises(SerializationError, match=r"other processes cannot import .*Local by its name"):
            await use()


async def test_a_value_that_contains_itself_is_refused(worker: Worker) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SerializationError, match="contains itself"):
        await worker.same(value)


def payload(code: int, content: Any) -> bytes:
    """A payload of a member that does not keep to the codec."""
    return bytes((PLAIN,)) + pack(pack_exts(code, content))


THING_OS = pack_exts(codes.THING, "os:system")
THING_GROUP = pack_exts(codes.THING, "builtins:BaseExceptionGroup")


@pytest.mark.parametrize(
    ("code", "content", "why"),
    [
        (codes.PICKLE, [pickle.dumps(1), b"", 0, 0], "refuses"),
        (codes.REBUILT, [THING_OS, ["true"], None, [], {}, None], "refuses"),
        (codes.NAMEDTUPLE, [THING_OS, ["true"]], "is no named tuple"),
        (codes.NAMEDTUPLE, [pack_exts(codes.THING, "subprocess:Popen"), ["true"]], "is no named tuple"),
        (codes.DATACLASS, [pack_exts(codes.THING, "builtins:dict"), {}], "is no dataclass"),
        (codes.RECORD, ["subprocess:Popen", {}], "is no dataclass"),
        (codes.MEMBER, ["sys:modules", "os"], "is no enumeration"),
        (codes.EXCEPTION, [THING_OS, ["true"], {}, None, {}], "is no exception"),
        (codes.EXCEPTION, [THING_GROUP, ["several", ["no error"]], {}, None, {}], "is not an exception"),
        (codes.BUILT, ["os:system", ["true"]], "os:system"),
    ],
    ids=str,
)
async def test_f87_what_a_member_sends_nevertheless_runs_nothing(
    plain: aiodaft.Runtime, code: int, content: Any, why: str
) -> None:
    with pytest.raises(SerializationError, match=why):
        decode(payload(code, content), home=peer_of(plain).process)


@pytest.mark.parametrize("args", [[], [1, 2, 3, 4, 5], ["utf-8", b"x", -(1 << 40), 1 - (1 << 40), "bad"]], ids=str)
async def test_an_exception_of_parts_that_do_not_suit_it_has_them_and_no_others(
    plain: aiodaft.Runtime, args: list[Any]
) -> None:
    content = [pack_exts(codes.THING, "builtins:UnicodeDecodeError"), args, {}, None, {"start": -9, "args": 1, "no": 1}]
    error = decode(payload(codes.EXCEPTION, content), home=peer_of(plain).process)
    assert (type(error), error.args, str(error), error.encoding) == (UnicodeDecodeError, tuple(args), "", None)


async def test_f87_code_that_a_member_sends_is_not_loaded(plain: aiodaft.Runtime) -> None:
    with pytest.raises(TypeError, match="code that was sent"):
        find(b"name", {b"name": Definition(pickle.dumps(print))})


async def test_a_process_has_runtimes_of_one_codec(plain: aiodaft.Runtime) -> None:
    with pytest.raises(ValueError, match="a runtime with another codec than 'pickle' is open"):
        async with aiodaft.Runtime():
            pass


async def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="a codec is 'pickle' or 'msgpack', not 'json'"):
        async with aiodaft.Runtime(codec="json"):  # type: ignore[arg-type]
            pass


async def test_neither_side_has_pickled_anything(
    plain: aiodaft.Runtime, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("this process pickles")

    monkeypatch.setattr(pickling.pickle, "loads", refuse)
    monkeypatch.setattr(pickling, "_dump", refuse)
    assert await worker.same([Box("a"), Point(1, 2), {"deep": [Settings(1.0)]}]) is not None
    async with plain.spawn(Worker) as other:
        assert await worker.ask(other, Color.RED) is Color.RED
