"""Mistakes of users, and their errors: at the line of the mistake, by name, and nothing else breaks (CR1)."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import new_class
from typing import Any

import pytest
from actors import Echo, Plain, Relay, SlowStart, Streamer, Trainer
from inside import awaited, peer_of, resources_of
from leaks import ended, is_alive
from probes import Abstract, Careless, DiesInConstructor, StuckInConstructor

import aiodaft


class Entered(aiodaft.Actor):
    """Is never left."""

    async def __aenter__(self) -> None: ...


class Opened:
    """Is never closed."""

    def __enter__(self) -> None: ...


class Shifted(aiodaft.Actor):
    """Wants one number."""

    def __init__(self, number: Any) -> None:
        self.next = number + 1


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def mrt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    """The module's runtime, for mistakes that break nothing."""
    return module_rt


async def test_a_method_without_the_decorator_says_which_decorator(mrt: aiodaft.Runtime) -> None:
    careless: Any = await mrt.spawn(Careless)
    with pytest.raises(AttributeError, match=r"^Careless.undecorated is not a remote method: .*@aiodaft.method$"):
        careless.undecorated()
    for name in ("size", "limit"):
        with pytest.raises(AttributeError, match=f"^Careless.{name} is not a method; a handle reaches methods only"):
            getattr(careless, name)
    with pytest.raises(AttributeError, match="^Careless has no method 'decorate'; its remote methods: decorated, str"):
        careless.decorate(1)
    with pytest.raises(
        AttributeError, match=r"^Careless.decorated has no 'remote': `handle.decorated\(...\)` calls it"
    ):
        careless.decorated.remote(1)
    with pytest.raises(AttributeError, match="its state is in another process; .* set 'limit'"):
        careless.limit = 4
    assert await careless.decorated(1) == 1


@pytest.mark.parametrize(
    ("mistake", "error", "reason"),
    [
        (
            lambda g: g.echo(1),
            AttributeError,
            r"has no attribute 'echo': use `group.all\(Echo.echo, ...\)`, or call it on",
        ),
        (lambda g: g.nothing, AttributeError, "^'Group' object has no attribute 'nothing'$"),
        (
            lambda g: g.all("echo", 1),
            TypeError,
            r"^'echo' is not a remote method of Echo: pass Echo.echo, not its name$",
        ),
        (lambda g: list(g.map(Echo.echo, [1])), TypeError, r"^<results of map\(Echo.echo\)> .*use `async for`$"),
        (lambda g: g.map(Echo.echo, [1]).__await__(), TypeError, "are many values: use `async for`, not `await`$"),
        (lambda g: g.each(Echo.echo, _items()), TypeError, r"^Echo.echo: the items are asynchronous: pass `\[item"),
    ],
)
async def test_a_wrong_call_of_a_group_says_what_is_right(
    mrt: aiodaft.Runtime, mistake: Callable[[Any], object], error: type[Exception], reason: str
) -> None:
    group = await mrt.group(1, Echo)
    with pytest.raises(error, match=reason):
        mistake(group)
    assert await copy.copy(group).all(Echo.echo, 1) == [1]


async def _items() -> AsyncIterator[int]:
    yield 1


async def test_a_handle_that_was_not_awaited_says_so(mrt: aiodaft.Runtime) -> None:
    with pytest.warns(RuntimeWarning, match=r"^spawn\(Echo\) was never awaited$"):
        _forget(mrt)
    spawned: Any = mrt.spawn(Echo)
    assert "not awaited yet" in repr(spawned)
    with pytest.raises(AttributeError, match=r"has no attribute 'echo': did you forget `await`"):
        spawned.echo(1)
    with pytest.raises(TypeError, match=r"expected an actor's handle, got Spawned: did you forget `await`"):
        await mrt.info(spawned)
    echo = await spawned
    with pytest.raises(RuntimeError, match="was awaited already; each call spawns once"):
        await spawned
    assert await echo.echo(1) == 1


def _forget(rt: aiodaft.Runtime) -> None:
    rt.spawn(Echo)
    gc.collect()


def _decorated(name: str) -> dict[str, Any]:
    async def function(self: object) -> None: ...

    function.__name__ = function.__qualname__ = name
    return {name: aiodaft.method(function)}


def _under_a_plain_decorator() -> Any:
    async def wrapped(self: object) -> None: ...

    return aiodaft.method(functools.wraps(wrapped)(lambda *args: wrapped(*args)))


async def test_half_a_context_manager_is_refused(mrt: aiodaft.Runtime) -> None:
    halves = ("__aenter__", "__aexit__"), ("__enter__", "__exit__")
    for half, other in (*halves, *(one[::-1] for one in halves)):
        cls = type("Half", (aiodaft.Actor,), {half: lambda self, *error: self})
        with pytest.raises(TypeError, match=f"^Half has {half} and no {other}: an actor is .*; add `.*def {other}"):
            await mrt.spawn(cls)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: type("Override", (Echo,), {"echo": lambda self, value: value}),
            r"^Override.echo overrides the remote method Echo.echo and is none itself: decorate it with @aiodaft",
        ),
        (
            lambda: type("Later", (Echo,), {"__init__": Echo.echo.__wrapped__}),
            r"^Later.__init__ cannot be `async def`: await in `async def __aenter__",
        ),
        (lambda: _decorated("__call__"), r"^__call__ cannot be a remote method: .* by another name"),
        (lambda: _under_a_plain_decorator(), r"wrapped is `async def` under a decorator that makes a plain function"),
        (
            lambda: new_class("Wrong", (Echo,), {"gpu": 1}),
            r"^class Wrong\(gpu\): .*; an Actor has the options cpus, gpus",
        ),
    ],
)
async def test_a_wrong_class_fails_at_its_own_line(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        make()


async def test_an_override_may_be_remote_or_hide_what_is_not(mrt: aiodaft.Runtime) -> None:
    kept = type("Kept", (Careless,), {**_decorated("decorated"), "undecorated": lambda self: 1, "stream": None})
    assert await (await mrt.spawn(kept)).decorated() is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda h: h.decorated(), r"Careless.decorated\(self, first: .*: missing a required argument: 'first'"),
        (lambda h: h.decorated(1, "2", 3.0), r"Careless.decorated\(.*: too many positional arguments"),
        (lambda h: h.decorated(1, fourth=4), r"Careless.decorated\(.*: got an unexpected keyword argument 'fourth'"),
        (lambda h: h.decorated(1, first=1), r"Careless.decorated\(.*: multiple values for argument 'first'"),
        (lambda h: h.decorated.tell(), r"Careless.decorated\(.*: missing a required argument: 'first'"),
        (lambda h: h.stream(), r"Careless.stream\(.*: missing a required argument: 'count'"),
        (lambda h: h.stream.tell(1), r"Careless.stream is a stream"),
    ],
)
async def test_wrong_arguments_fail_at_the_call_and_nothing_is_sent(
    mrt: aiodaft.Runtime, call: Callable[[Any], object], reason: str
) -> None:
    careless = await mrt.spawn(Careless)
    connection = list(peer_of(mrt).connections.values())[-1]
    sent = connection.traffic.messages_sent
    with pytest.raises(TypeError, match=reason):
        call(careless)
    assert connection.traffic.messages_sent == sent


@pytest.mark.parametrize(
    ("spawn", "error", "reason"),
    [
        (lambda rt: rt.spawn(Trainer), TypeError, r"^Trainer\(lr: .*: missing a required argument: 'lr'$"),
        (lambda rt: rt.spawn(Trainer, 1, 2), TypeError, r"^Trainer\(lr: .*: too many positional arguments$"),
        (lambda rt: rt.spawn(Trainer, rate=1), TypeError, r"^Trainer\(lr: .*: missing a required argument: 'lr'$"),
        (lambda rt: rt.group(2, Trainer, gpus=1), TypeError, r"^Trainer\(lr: "),
        (lambda rt: rt.spawn(Plain), TypeError, r"^Plain\(base: .*: missing a required argument: 'base'$"),
        (lambda rt: rt.spawn(Entered), TypeError, r"^Entered has .*and no __aexit__: .*`async def __aexit__"),
        (lambda rt: rt.spawn(Opened), TypeError, r"^Opened has __enter__ and no __exit__: an actor is left when"),
        (lambda rt: rt.spawn(Echo()), TypeError, r"^spawning takes a class and its constructor's arguments, not <"),
        (lambda rt: rt.spawn(len), TypeError, r"^spawning takes a class"),
        (lambda rt: rt.group(0, Echo), ValueError, r"positive number of members, not 0"),
        (lambda rt: rt.group(2.5, Echo), ValueError, r"positive number of members, not 2.5"),
    ],
)
async def test_a_wrong_spawn_fails_at_its_own_line(
    mrt: aiodaft.Runtime, spawn: Callable[[Any], object], error: type[Exception], reason: str
) -> None:
    before = set(peer_of(mrt).connections)
    with pytest.raises(error, match=reason):
        spawn(mrt)
    assert set(peer_of(mrt).connections) == before


async def test_a_stream_is_neither_awaited_nor_passed_on(mrt: aiodaft.Runtime) -> None:
    streamer, echo = await mrt.spawn(Streamer), await mrt.spawn(Echo)
    stream: Any = streamer.numbers(3)
    with pytest.raises(TypeError, match="is many values: use `async for`"):
        await stream
    with pytest.raises(TypeError, match="is asynchronous: use `async for`"):
        list(stream)
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"let the actors share a Channel"):
        echo.echo(stream)
    assert [item async for item in stream] == [0, 1, 2]


async def test_what_belongs_to_this_process_cannot_be_passed_and_is_named(mrt: aiodaft.Runtime) -> None:
    echo = await mrt.spawn(Echo)
    async with mrt.scope() as scope:
        for value, name in ((mrt, "Runtime"), (scope, "Scope")):
            with pytest.raises(
                aiodaft.exceptions.SerializationError,
                match=rf"^args\[0\] of Echo.echo cannot travel to Echo-\d+: .*{name}",
            ):
                echo.echo(value)
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"^args\[0\]\['rt'\] of Echo.echo cannot travel"):
        echo.echo({"rt": mrt})
    with pytest.raises(
        aiodaft.exceptions.SerializationError, match=r"^args\[0\] .*Echo.echo stays .*pass the actor's handle"
    ):
        echo.echo(echo.echo)
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"Relay.*cannot travel|cannot travel.*Relay"):
        echo.echo(spawned := mrt.spawn(Relay))
    await spawned


async def test_a_class_that_cannot_be_pickled_fails_the_spawn_and_gives_back_its_place(mrt: aiodaft.Runtime) -> None:
    before, lock = await resources_of(mrt), threading.Lock()

    class Locked(aiodaft.Actor, gpus=1):
        @aiodaft.method
        async def use(self) -> bool:
            return lock.locked()

    with pytest.raises(
        aiodaft.exceptions.SerializationError, match=r"^the variable lock of .*, in the class.use of Locked cannot"
    ):
        await mrt.spawn(Locked)
    with pytest.raises(aiodaft.exceptions.SerializationError, match=r"^args\[0\] of Trainer cannot travel"):
        await mrt.on(gpus=1).spawn(Trainer, lock)  # type: ignore[arg-type]  # the mistake under test
    assert await resources_of(mrt) == before


async def test_an_abstract_class_cannot_be_spawned(mrt: aiodaft.Runtime) -> None:
    spawned = None
    with pytest.raises(TypeError, match="^Abstract is abstract: missing are missing$"):
        spawned = mrt.spawn(Abstract)
    assert spawned is None


@pytest.fixture
def licensed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[aiodaft.Actor]]:
    """An actor class of a module that only this process can import."""
    (tmp_path / "licensed.py").write_text(
        "import os, aiodaft\n"
        f"if os.getpid() != {os.getpid()}: raise ImportError('no licence for this process')\n"
        "class Licensed(aiodaft.Actor): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("licensed").Licensed
    del sys.modules["licensed"]


async def test_a_class_that_cannot_be_imported_by_the_worker_fails_the_spawn(licensed: type[aiodaft.Actor]) -> None:
    async with aiodaft.Runtime(preload=(), gpus=1) as rt:
        before = await resources_of(rt)
        with pytest.raises(aiodaft.SpawnFailed, match=r"Licensed-1(.|\n)*no licence for this process") as caught:
            await rt.on(gpus=1).spawn(licensed)
        assert caught.value.executed is False
        assert await resources_of(rt) == before


async def test_a_constructor_that_raises_fails_the_spawn_with_its_own_error(mrt: aiodaft.Runtime) -> None:
    before, connections = await resources_of(mrt), len(peer_of(mrt).connections)
    with pytest.raises(ValueError, match="no weights") as caught:
        await mrt.on(gpus=1).spawn(SlowStart, 0.0, "no weights")
    assert any(note.startswith("raised while SlowStart-") for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="no weights"):
        await mrt.on(gpus=1).group(2, SlowStart, 0.0, "no weights")
    assert await resources_of(mrt) == before
    assert sum(connection.lost is None for connection in peer_of(mrt).connections.values()) <= connections


@pytest.mark.parametrize(("how", "code", "number"), [("exit", 7, None), ("_exit", 7, None), ("kill", None, "SIGKILL")])
async def test_a_constructor_that_ends_the_process_fails_the_spawn_with_the_evidence(
    mrt: aiodaft.Runtime, how: str, code: int | None, number: str | None
) -> None:
    before, echo = await resources_of(mrt), await mrt.spawn(Echo)
    with pytest.raises(aiodaft.ActorDied, match=r"^DiesInConstructor-\d+ \(pid \d+\)") as caught:
        await mrt.on(gpus=1).spawn(DiesInConstructor, how)
    assert (caught.value.exit_code, caught.value.signal) == (code, number)
    assert caught.value.last_lines == (f"about to {how}",)
    assert await resources_of(mrt) == before
    assert await echo.echo("untouched") == "untouched"


async def _made(path: Path) -> int:
    while not (pid := _read(path)):
        await asyncio.sleep(0.01)
    return int(pid)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_a_scope_that_ends_while_an_actor_is_made_takes_it_along(mrt: aiodaft.Runtime, tmp_path: Path) -> None:
    before = await resources_of(mrt)
    async with mrt.scope() as scope:
        making = asyncio.get_running_loop().create_task(
            awaited(scope.on(gpus=1).spawn(StuckInConstructor, str(tmp_path / "pid")))
        )
        pid = await _made(tmp_path / "pid")
    try:
        async with asyncio.timeout(5):
            with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="its scope is closed"):
                await asyncio.shield(making)
        assert not is_alive(pid)
        assert await resources_of(mrt) == before
    finally:
        making.cancel()
        await asyncio.wait([making])


async def test_c45_a_constructor_that_hangs_is_given_up_at_the_deadline(mrt: aiodaft.Runtime, tmp_path: Path) -> None:
    before = await resources_of(mrt)

    async def spawn() -> None:
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(1):
                await mrt.on(gpus=1).spawn(StuckInConstructor, str(tmp_path / "pid"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(spawn())
        pid = await _made(tmp_path / "pid")
    await ended(pid)
    assert await resources_of(mrt) == before


async def test_a_runtime_that_ends_while_an_actor_is_made_takes_it_along(tmp_path: Path) -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        making = asyncio.get_running_loop().create_task(awaited(rt.spawn(StuckInConstructor, str(tmp_path / "pid"))))
        pid = await _made(tmp_path / "pid")
    assert not is_alive(pid)
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await making


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("get", r"`await ref`, or in a thread `ref.result\(\)`"),
        ("put", r"`rt.put\(value\)`"),
        ("wait", r"`await asyncio.wait\(refs\)`"),
        ("init", r"`async with aiodaft.Runtime\(\) as rt:`"),
        ("remote", r"`class W\(aiodaft.Actor\)` with `@aiodaft.method`"),
        ("nothing", "$"),
    ],
)
async def test_a_name_of_another_framework_says_what_it_is_called_here(name: str, word: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'aiodaft' has no attribute '{name}'(: use )?{word}"):
        getattr(aiodaft, name)


@pytest.mark.parametrize(
    ("guess", "error", "reason"),
    [
        (lambda rt: rt.submit, AttributeError, r"no attribute 'submit': use `pool = await rt.pool\(n\)`"),
        (lambda rt: rt.map, AttributeError, r"no attribute 'map': use .* `async for result in pool.map\("),
        (lambda rt: rt.actors, AttributeError, r"no attribute 'actors': use `\(await rt.overview\(\)\).actors`"),
        (lambda rt: rt.close, AttributeError, r"no attribute 'close': use `await rt.aclose\(\)`"),
        (lambda rt: rt.sunmit, AttributeError, "^'Runtime' object has no attribute 'sunmit'$"),
        (lambda rt: rt.on(num_gpus=1), TypeError, r"^on\(\) has no option 'num_gpus': use `rt.on\(gpus=...\)`; its "),
        (lambda rt: rt.on(gpu=1), TypeError, r"^on\(\) has no option 'gpu'; its options are cpus, gpus, .*, python$"),
        (lambda rt: rt.spawn(Echo, name="a"), TypeError, r"^Echo.* argument 'name': use `rt.on\(name=...\)`$"),
        (lambda rt: rt.group(2, Echo, num_gpus=1), TypeError, r"argument 'num_gpus': use `rt.on\(gpus=...\)`$"),
        (lambda rt: rt.spawn(Echo, nonsense=1), TypeError, "argument 'nonsense'$"),
        (
            lambda rt: rt.group(Echo, 3),
            TypeError,
            r"^the number .*s comes first: use `rt.group\(3, Echo, ...\)`$",
        ),
        (lambda rt: rt.group(3, Echo, [1, 2, 3]), TypeError, r"\n.* not one of the 3 elements: use `each="),
        (lambda rt: aiodaft.gather(rt.put(1), rt.put(2)), TypeError, r"^a collective takes .*`await asyncio.gather\("),
        (lambda rt: aiodaft.all_reduce(rt.put(1)), TypeError, "^a collective takes the refs of all members together"),
    ],
)
async def test_a_first_guess_names_the_right_word(
    mrt: aiodaft.Runtime, guess: Callable[[Any], object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        guess(mrt)


async def test_a_constructor_that_takes_the_parts_of_all_members_for_its_own_is_told_so(mrt: aiodaft.Runtime) -> None:
    for parts, notes in (([1, 2], 1), ([1, 2, 3], 0)):
        with pytest.raises(TypeError) as told:
            await mrt.group(2, Shifted, parts)
        said = [note for note in told.value.__notes__ if note.startswith("each member gets the same arguments")]
        assert len(said) == notes


@pytest.mark.parametrize(
    "name", ["AIODAFT_ADRESS", "AIODAFT_ADDR", "DAFT_ADDRESS", "AIODAF_ADDRESS", "aiodaft_address"]
)
async def test_an_address_in_a_variable_with_a_typo_is_no_reason_to_run_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:7777")
    with pytest.raises(ValueError, match=rf"^\${name} is no variable of aiodaft: set \$AIODAFT_ADDRESS instead"):
        aiodaft.Runtime()
    monkeypatch.delenv(name)
    monkeypatch.setenv("AIODAFT_ADDRESS", "")
    aiodaft.Runtime()


async def test_a_program_that_srun_runs_on_several_machines_is_told_once_that_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for task, nodes, warnings in (("0", "1", 0), ("1", "2", 0), ("0", "2", 1)):
        monkeypatch.setenv("SLURM_PROCID", task)
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", nodes)
        aiodaft.Runtime()
        assert len(caplog.messages) == warnings
    assert "on 2 machines, and each has a runtime of its own: use `srun --ntasks-per-node=1 aiodaft" in caplog.text


async def test_a_start_that_is_not_awaited_says_so() -> None:
    starting: Any = aiodaft.start()
    assert repr(starting) == "<aiodaft.start(), not awaited yet: `rt = await aiodaft.start()`>"
    with pytest.raises(
        AttributeError, match=r"not awaited yet: `rt = await aiodaft.start\(\)`> has no attribute 'spawn'$"
    ):
        starting.spawn(Echo)
    starting.close()
