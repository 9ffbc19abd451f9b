"""A definition that a process cannot import is sent to it once, is one thing there, and is freed with its last user."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from actors import Echo
from definition_actors import Taker

import aiodaft

CALLS = 10_000
CODE = 1_000
SCRIPT = str(Path(__file__).parents[1] / "support/script_definitions.py")


def define(factor: int = 1) -> type[Any]:
    """A class that no process can import."""

    @dataclass
    class Local:
        value: int

        def size(self) -> int:
            return self.value * factor

    return Local


async def settle() -> None:
    """The other processes are told of dropped definitions before the next call."""
    gc.collect()
    await asyncio.sleep(0)


@pytest.fixture
async def runtime(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    async with aiodaft.Runtime() as opened:
        yield opened


async def test_ten_thousand_calls_send_the_code_of_a_class_once(runtime: aiodaft.Runtime) -> None:
    taker = await runtime.spawn(Taker)
    local = define()
    before = runtime.traffic()
    for _ in range(CALLS // 100):
        assert await asyncio.gather(*(taker.size(local(number)) for number in range(100))) == list(range(100))
    after = runtime.traffic()
    # The code alone has more bytes than the messages of a call.
    assert after.control_sent - before.control_sent < CALLS * CODE // 10


async def test_instances_of_a_class_with_slots_come_back(runtime: aiodaft.Runtime) -> None:
    class Slotted:
        __slots__ = ("value",)

        def __init__(self, value: int) -> None:
            self.value = value

    @dataclass(slots=True)
    class Pair:
        first: int
        second: int = 2

    class Named(NamedTuple):
        name: str

    echo = await runtime.spawn(Echo)
    back = await echo.echo([Slotted(1), Pair(1), Named("a")])
    assert [type(one) for one in back] == [Slotted, Pair, Named]
    assert (back[0].value, *back[1:]) == (1, Pair(1), Named("a"))


async def test_an_error_in_code_that_was_sent_shows_the_line_of_its_file(runtime: aiodaft.Runtime) -> None:
    class Failing(aiodaft.Actor):
        @aiodaft.method
        def fail(self, given: Any) -> None:
            given()

    def give() -> None:
        raise ValueError("an error of the program")

    failing = await runtime.spawn(Failing)
    with pytest.raises(ValueError, match="of the program") as caught:
        await failing.fail(give)
    lines = [(frame.filename, frame.line) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[-2:] == [(__file__, "given()"), (__file__, 'raise ValueError("an error of the program")')]


async def test_an_instance_that_comes_back_is_of_the_class_itself(runtime: aiodaft.Runtime) -> None:
    taker = await runtime.spawn(Taker)
    local = define()
    size = local.size
    for method in (taker.echo, taker.echo_on_thread):
        for value in (local(1), [local(2), {"a": local(3)}]):
            got = await method(value)
            assert got == value
        assert type(await method(local(4))) is local
        assert await method(local) is local
    assert local.size is size


async def test_a_class_that_is_defined_again_is_a_new_one(runtime: aiodaft.Runtime) -> None:
    taker = await runtime.spawn(Taker)
    first, second = define(), define(10)
    assert [await taker.size(first(1)), await taker.size(second(1)), await taker.size(first(2))] == [1, 10, 2]
    assert type(await taker.echo(first(1))) is first
    assert type(await taker.echo(second(1))) is second
    assert await taker.classes("Local") == 2


async def test_a_class_is_freed_with_its_last_user_also_where_it_was_sent(runtime: aiodaft.Runtime) -> None:
    a, b = await runtime.spawn(Taker), await runtime.spawn(Taker)
    local: Any = make_dataclass("Freed", ["value"])
    # A result without it keeps it as little as one that was dropped.
    kept = [a.echo([1]), b.echo([local(1)])]
    assert [await ref for ref in kept] == [[1], [local(1)]]
    del kept[1:]
    for taker in (a, b, a):
        assert await taker.echo(local(1)) == local(1)
    await b.echo(a.echo(local(1)))
    assert await a.classes("Freed") == await b.classes("Freed") == 1
    del local
    await settle()
    assert await a.classes("Freed") == await b.classes("Freed") == 0


async def test_a_call_that_waits_keeps_its_class(runtime: aiodaft.Runtime) -> None:
    taker = await runtime.spawn(Taker)
    gate = taker.wait()
    waiting = [taker.size(define(factor)(2)) for factor in (1, 2, 3)]
    await settle()
    assert await taker.classes("Local") == 0
    await taker.open_gate()
    await gate
    assert [await size for size in waiting] == [2, 4, 6]


async def test_a_class_is_sent_as_it_is_at_each_call(runtime: aiodaft.Runtime) -> None:
    taker = await runtime.spawn(Taker)
    factor, factors = 1, [1]

    @dataclass
    class Local:
        value: int

        def size(self) -> int:
            return self.value * factor * self.more()

        def more(self) -> int:
            return 1

    @dataclass
    class Changing:
        value: int

        def size(self) -> int:
            return self.value * factors[-1]

    assert [await taker.size(Local(2)), await taker.size(Changing(2))] == [2, 2]
    factor = 5
    factors.append(7)
    assert [await taker.size(Local(2)), await taker.size(Changing(2))] == [10, 14]
    Local.more = lambda self: 2  # type: ignore[method-assign]
    assert await taker.size(Local(2)) == 20
    factor = 1
    assert await taker.size(Local(2)) == 4
    assert type(await taker.echo(Local(1))) is Local


async def test_a_value_with_a_class_goes_on_to_other_processes(runtime: aiodaft.Runtime) -> None:
    a, b = await runtime.spawn(Taker), await runtime.spawn(Taker)
    local = define(3)
    assert await b.size(a.echo(local(1))) == 3
    got = a.echo(local(2))
    assert await got == local(2)
    assert await b.size(got) == 6
    assert await b.size(runtime.put(local(3))) == 9
    assert [item.size() async for item in a.items(local(1))] == [3, 3]
    async with aiodaft.compile(lambda x: b.size(a.echo(x))) as graph:
        assert [await graph(local(1)), await graph(local(2))] == [3, 6]


async def test_what_a_script_defines_travels_and_each_process_has_its_globals_once() -> None:
    # -bb: comparing bytes with text is an error.
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-bb", SCRIPT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert ((await run.communicate())[0].decode(), run.returncode) == ("", 0)


async def test_structs_of_msgspec_travel_with_their_options(runtime: aiodaft.Runtime) -> None:
    msgspec: Any = pytest.importorskip("msgspec")

    class Order(msgspec.Struct, frozen=True, tag="order"):  # type: ignore[misc]
        amount: int
        notes: list[str] = msgspec.field(default_factory=list, name="remarks")

        def size(self) -> int:
            return self.amount

    class Express(Order, frozen=True, kw_only=True, rename="camel"):  # type: ignore[call-arg,misc]
        sent_by: str = "post"

    taker = await runtime.spawn(Taker)
    for order in (Order(3), Express(amount=3, sent_by="air")):
        assert await taker.size(order) == 3
        back = await taker.echo(order)
        assert back == order
        assert type(back) is type(order)
        assert msgspec.json.decode(await taker.call(msgspec.json.encode, order), type=type(order)) == order


async def test_an_attribute_of_a_class_that_comes_back_is_left_alone(runtime: aiodaft.Runtime) -> None:
    class Counting:
        sizes: ClassVar[list[int]] = []

        def size(self) -> int:
            self.sizes.append(0)
            return len(self.sizes)

    taker = await runtime.spawn(Taker)
    assert [await taker.size(Counting()), await taker.size(Counting())] == [1, 2]
    assert type(await taker.echo(Counting())) is Counting
    assert Counting.sizes == []
    # The actor takes the program's change.
    Counting.sizes.append(7)
    assert await taker.size(Counting()) == 2


async def test_a_global_that_cannot_travel_is_named(runtime: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GATE", threading.Lock(), raising=False)

    class Guarded(aiodaft.Actor):
        @aiodaft.method
        def work(self) -> None:
            with GATE:  # type: ignore[name-defined]  # noqa: F821 - set above
                pass

    with pytest.raises(
        aiodaft.exceptions.SerializationError, match=r"the global GATE that .*work uses, in the class.work of Guarded"
    ):
        await runtime.spawn(Guarded)


async def test_an_actor_gets_its_arguments_again_when_it_is_restarted(runtime: aiodaft.Runtime) -> None:
    local = define(2)
    taker = await runtime.on(restart=aiodaft.Restart()).spawn(Taker, local(21))
    assert await taker.first_size() == 42
    assert await taker.size(local(1)) == 2
    (pid,) = [(await runtime.info(taker)).pid]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aiodaft.DaftError):
        await taker.wait()
    assert await taker.first_size() == 42
    assert await taker.size(local(1)) == 2
