"""Every kind of value goes through processes, and one that cannot is named (row DP1)."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import traceback
import types
from typing import Any, NamedTuple

import pytest
import torch
from actors import Echo
from inside import peer_of
from torch_actors import Keeper

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass."""

    name: str
    sizes: tuple[int, ...]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


PLAIN: list[Any] = [
    None, True, 0, -1, 2**64, -(2**200), 1e308, float("inf"), "", "ä€🙂", "\ud800", b"\x00", bytearray(b"mutable"), (),
    ((1, 2), [3]), [[[]]], {}, {(1, "a"): [None]}, {None: 1, True: 2.5}, {1, "a"}, frozenset({(1, 2)}), complex(1, -2),
    Config("a", (1, 2), {"k": [1]}), Point(1, (2,)),
]  # fmt: skip


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The content of a tensor, for dtypes that cannot be compared."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class Holder:
    """Something ordinary with something that cannot travel in it."""

    def __init__(self, item: Any) -> None:
        self.cfg = types.SimpleNamespace(fn=item)


async def test_what_cannot_travel_is_refused_in_one_line_without_frames_of_pickle(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    deep: Any = threading.Lock()
    for _ in range(200):
        deep = types.SimpleNamespace(next=deep)
    endless: Any = []
    for _ in range(100_000):
        endless = [endless]
    advice = r"make it in the actor, or leave it out of its object's state \(`__getstate__`\)$"
    for value, what in (
        (threading.Lock(), rf"cannot pickle '_thread.lock' object \(_thread.lock\); {advice}"),
        (deep, rf"cannot pickle '_thread.lock' object .*; {advice}"),
        (asyncio.get_running_loop(), advice),
        (
            (item for item in "ab"),
            r"cannot pickle 'generator' object .*, `yield` them in the method itself, which is a",
        ),
        (
            endless,
            "maximum recursion depth exceeded .*; it is nested too deeply: make it flatter, or make it in the actor$",
        ),
    ):
        with pytest.raises(
            aiodaft.exceptions.SerializationError,
            match=rf"^args\[0\]\S* of Echo.echo cannot travel to Echo-\d+: .*{what}",
        ) as caught:
            echo.echo(value)
        cause = caught.value.__cause__
        assert cause is None or (value is endless and isinstance(cause, RecursionError) and not cause.__traceback__)
        assert caught.value.__context__ is None
        assert "\n" not in str(caught.value)


async def test_what_the_users_own_code_raises_when_an_argument_is_pickled_is_the_cause(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"cannot travel to Echo-\d+: not today") as caught:
        echo.echo([Refuses()])
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert cause.__context__ is None
    frames = traceback.extract_tb(cause.__traceback__)
    assert [frame.name for frame in frames] == ["__getstate__"]


class Refuses:
    """Raises while it is pickled."""

    def __getstate__(self) -> None:
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: Holder(lock), r"args\[0\].cfg.fn of Echo.echo"),
        (lambda lock: {"a": [1, (2, lock)]}, r"args\[0\]\['a'\]\[1\]\[1\] of Echo.echo"),
        (lambda lock: Config("c", (), {"lock": lock}), r"args\[0\].extra\['lock'\] of Echo.echo"),
        (lambda lock: [Point(1, lock)], r"args\[0\]\[0\].y of Echo.echo"),
        (lambda lock: (item for item in [lock]), r"args\[0\] of Echo.echo"),
    ],
)
async def test_what_cannot_travel_is_named_before_anything_is_sent(rt: aiodaft.Runtime, make: Any, path: str) -> None:
    echo = await rt.spawn(Echo)
    connection = list(peer_of(rt).connections.values())[-1]
    sent = connection.traffic.messages_sent
    with pytest.raises(aiodaft.exceptions.SerializationError, match=rf"^{path} cannot travel") as caught:
        echo.echo(make(threading.Lock()))
    assert caught.value.executed is False
    with pytest.raises(aiodaft.exceptions.SerializationError, match="value of Echo.echo cannot travel"):
        echo.echo(value=threading.Lock())
    assert connection.traffic.messages_sent == sent
    assert await echo.echo("fine") == "fine"


async def test_values_through_a_process(rt: aiodaft.Runtime) -> None:
    echo, keeper = await rt.spawn(Echo), await rt.spawn(Keeper)
    for value in PLAIN:
        for method in (echo.echo, echo.echo_on_thread):
            got = await method(value)
            assert got == value
            assert type(got) is type(value)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool):
        tensor = torch.ones(5, 3).to(dtype)
        assert as_bytes(await keeper.echo(keeper.echo(tensor))) == as_bytes(tensor)
    base = torch.zeros(1_000_000)
    first, second = await keeper.echo(keeper.echo([base[:700_000], base[300_000:]]))
    first[500_000] = 1.0
    assert second[200_000] == 1.0


async def test_large_python_objects_go_through(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    for value in (list(range(100_000)), {str(i): [i] for i in range(40_000)}, [Point(i, i) for i in range(30_000)]):
        assert await echo.echo(value) == value
        assert await echo.echo_on_thread(value) == value
        assert await rt.put(value) is value
        assert await echo.echo(rt.put(value)) == value
