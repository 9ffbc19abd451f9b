"""Values on the edge: copies of refs, refs in unusual containers, cycles, and values that must not travel."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from actors import Echo
from odd_actors import Odd
from odd_containers import CONTAINERS, Packer, facts

import aiodaft
from aiodaft import Channel, Ref, Refs

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


class Listing(list[Any]):
    """A list of its own kind."""


class ByName(list[Any]):
    """A list that pickle finds by a name."""

    def __reduce__(self) -> str:
        return "NAME"


class Plain:
    """Neither a container nor a record."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Extended:
    """Has more than its fields."""

    value: Any

    def __post_init__(self) -> None:
        self.extra = 5


@pytest.mark.parametrize("near", [False, True], ids=["other process", "same process"])
async def test_refs_in_containers_and_records_stand_for_their_values(rt: aiodaft.Runtime, near: bool) -> None:
    packer = await rt.spawn(Packer)
    echo = await rt.on(with_=packer).spawn(Echo) if near else await rt.spawn(Echo)
    for kind, make in CONTAINERS.items():
        assert facts(await packer.pass_on(kind, echo)) == facts(make(1)), kind


async def test_refs_in_other_objects_stay_refs(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(1)
    kept = await echo.echo([collections.deque([Plain(ref)]), ref])
    assert kept[1] == 1
    assert await kept[0][0].value == 1


async def test_a_graph_finds_refs_in_every_container(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    async with aiodaft.compile(lambda x: collections.OrderedDict(a=echo.echo(collections.deque([x], 2)))) as graph:
        out = graph(1)
        assert type(out) is collections.OrderedDict
        assert await out["a"] == collections.deque([1])


async def test_a_class_that_hides_its_refs_is_named(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    with pytest.raises(
        aiodaft.exceptions.SerializationError, match="ByName has refs inside and is pickled by its name"
    ):
        echo.echo(ByName([echo.echo(1)]))


async def test_a_dataclass_with_a_ref_keeps_what_is_no_field(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    back = await echo.echo(Extended(echo.echo(1)))
    assert (back.value, back.extra) == (1, 5)


async def test_what_contains_itself_reaches_a_neighbour(rt: aiodaft.Runtime) -> None:
    first = await rt.spawn(Odd)
    second = await rt.on(with_=first).spawn(Odd)
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert await second.kind(cycle) == "list"


async def test_refs_and_handles_are_copied_as_themselves(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(1)
    assert copy.copy(ref) is ref
    assert copy.deepcopy([ref])[0] is ref
    assert dataclasses.asdict(Extended(ref))["value"] is ref
    assert copy.deepcopy(echo) == echo
    assert await pickle.loads(pickle.dumps(echo)).echo(2) == 2
    with pytest.raises(TypeError, match="travels only as, or inside, an argument"):
        pickle.dumps(ref)
    with pytest.raises(AttributeError, match="never initialised"):
        Ref.__new__(Ref).name  # noqa: B018 - it must not recurse


async def test_handles_beside_each_other_travel_as_themselves(rt: aiodaft.Runtime) -> None:
    echo, odd = await rt.spawn(Echo), await rt.spawn(Odd)
    kept = await rt.on(restart=aiodaft.Restart()).group(2, Echo)
    services = await rt.group(2, Listing)
    for value in (
        [echo, echo],
        (odd, echo),
        {odd, echo},
        {"kept": [*kept], "one": [echo]},
        [[kept[1]], list(kept), [1]],
    ):
        assert await echo.echo(value) == value
    back = await echo.echo([services[1], services[0]])
    assert [service.handle for service in back] == [services[1].handle, services[0].handle]
    with pytest.raises(AttributeError, match="Echo has no method 'kind'"):
        (await echo.echo([odd, echo]))[1].kind()


async def test_an_actors_own_instance_does_not_travel(rt: aiodaft.Runtime) -> None:
    odd = await rt.spawn(Odd)
    with pytest.raises(
        aiodaft.exceptions.SerializationError, match="an instance of Odd stays in its process: pass the handle"
    ):
        await odd.myself()


async def test_an_open_file_does_not_travel(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    echo = await rt.spawn(Echo)
    path = tmp_path / "file"
    path.write_text("content")
    with (
        path.open() as file,
        pytest.raises(aiodaft.exceptions.SerializationError, match=r"args\[0\] of Echo.echo .* pass its path"),
    ):
        echo.echo(file)


async def test_items_that_cannot_be_read_use_up_their_credit(rt: aiodaft.Runtime) -> None:
    odd = await rt.spawn(Odd)
    stream = odd.every_second_unreadable(60)
    good = bad = 0
    while True:
        try:
            await anext(stream)
            good += 1
        except StopAsyncIteration:
            break
        except aiodaft.exceptions.SerializationError:
            bad += 1
    assert (good, bad) == (30, 30)


async def test_large_items_wait_for_a_queue_that_is_on_its_way(rt: aiodaft.Runtime) -> None:
    for _ in range(5):
        sender, receiver = await rt.spawn(Odd), await rt.spawn(Odd)
        channel: Channel[bytes] = Channel(2)
        pushing = sender.push(channel, 6, 200_000)
        while not (await rt.info(sender)).running:
            await asyncio.sleep(0)
        pulling = receiver.pull(channel, 6)
        assert await pulling == 6 * 200_000
        await pushing
        await rt.stop(sender)
        await rt.stop(receiver)


async def test_an_item_is_what_it_was_when_it_was_sent(rt: aiodaft.Runtime) -> None:
    odd = await rt.spawn(Odd)
    channel: Channel[Any] = Channel(2)
    item = bytearray(b"a")
    await channel.send(item)
    item.extend(b"bc")
    assert await odd.pull(channel, 1) == 1


async def test_a_graph_makes_lists_of_its_own_results(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    async with aiodaft.compile(lambda x: echo.echo(Refs([echo.echo(x), echo.echo(x)]).gather())) as graph:
        assert await graph(1) == [1, 1]
        assert await graph(2) == [2, 2]


@pytest.mark.parametrize("seconds", ["a", float("nan"), -1])
async def test_a_deadline_is_a_number(seconds: Any) -> None:
    with pytest.raises(ValueError, match="a deadline is a number of seconds"):
        async with aiodaft.deadline(seconds):
            pass


@pytest.mark.parametrize("name", ["stop_grace", "cancel_grace", "max_pending"])
@pytest.mark.parametrize("value", ["x", float("nan"), -1])
async def test_limits_of_a_runtime_are_numbers(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name}="):
        aiodaft.Runtime(**options)


async def test_modules_on_a_path_that_was_added_later_are_found(
    rt: aiodaft.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "added_later.py").write_text(
        "import aiodaft\nclass Late(aiodaft.Actor):\n    @aiodaft.method\n    async def here(self): return 'here'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import added_later  # type: ignore[import-not-found]  # it is there by now

    try:
        late: Any = await rt.spawn(added_later.Late)
        assert await late.here() == "here"
    finally:
        del sys.modules["added_later"]


@pytest.mark.parametrize("wrap", [lambda value: (value,), Extended])
async def test_values_deep_in_others_travel_or_are_refused(rt: aiodaft.Runtime, wrap: Any) -> None:
    echo = await rt.spawn(Echo)
    deep: Any = 7
    for _ in range(240):
        deep = wrap(deep)
    found = await echo.echo(deep)
    for _ in range(240):
        (found,) = found if isinstance(found, tuple) else (found.value,)
    assert found == 7
    # From Python 3.14 on the limit is the memory of the stack: more than 50,000 levels.
    for _ in range(100_000):
        deep = wrap(deep)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="nested too deeply"):
        await echo.echo(deep)
    assert await echo.echo("goes on") == "goes on"
