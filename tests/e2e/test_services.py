"""Hosted classes: every method of a class can be used through a service, and there are groups of services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from actors import Echo, Plain
from hosted import Base, BothWays, Connection, Engine

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("generate", [Engine.words, Engine.letters])
async def test_a_generator_gives_a_stream(module_rt: aiodaft.Runtime, generate: Any) -> None:
    service = await module_rt.spawn(Engine)
    stream = service.call(generate, "a b c")
    assert isinstance(stream, aiodaft.Stream)
    assert "".join([item async for item in stream]).replace(" ", "") == "abc"
    async for _ in service.call(generate, "a " * 1000):
        break
    while await service.get("closed_streams") < 2:
        await asyncio.sleep(0)


async def test_methods_of_every_kind_are_called(module_rt: aiodaft.Runtime) -> None:
    service = await module_rt.spawn(Engine, 3)
    assert await service.call(Engine.scale, 5) == 16
    assert await service.call(Engine.scale_later, service.call(Engine.scale, 5)) == 48
    assert await service.call(Engine.__call__, 5) == "called with 5"
    assert await service.call(Engine.__len__) == 3
    assert await service.call(Engine.count, "four") == 4
    assert await service.call(Engine.count_later, text="four") == 4
    assert await service.call(Engine.kind) == "Engine"
    assert await service.call(Engine.kind, suffix="!") == "Engine!"


async def test_a_method_of_a_base_is_that_of_the_hosted_class(module_rt: aiodaft.Runtime) -> None:
    service = await module_rt.spawn(Engine, 3)
    assert await service.call(Base.scale, 5) == 16
    assert await (await module_rt.spawn(Base, 3)).call(Base.scale, 5) == 15


async def test_a_function_with_several_names_is_called_by_its_public_one(module_rt: aiodaft.Runtime) -> None:
    """Like `torch.nn.Module.__call__`: its own name is a private one."""
    service = await module_rt.spawn(Renamed, 3)
    assert Renamed.__call__.__name__ == "_run"
    assert await service.call(Renamed.__call__) == 3


class Renamed(Base):
    """Runs when it is called."""

    def _run(self) -> int:
        return self.gain

    __call__ = _run


async def test_attributes_and_properties_are_read(module_rt: aiodaft.Runtime) -> None:
    service = await module_rt.spawn(Engine, 3)
    assert await service.get("gain") == 3
    assert await service.get("doubled") == 6
    assert await service.get("thread") == (await module_rt.info(service)).name
    echo = await module_rt.spawn(Echo)
    assert await echo.echo(service.get("doubled")) == 6
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'nothing'"):
        await service.get("nothing")
    with pytest.raises(AttributeError, match="Engine._hidden is private"):
        service.get("_hidden")
    with pytest.raises(TypeError, match=r"use `service.call\(Engine.scale, ...\)`"):
        service.get("scale")


async def test_what_cannot_be_called_says_what_to_do(module_rt: aiodaft.Runtime) -> None:
    service = await module_rt.spawn(Engine)
    with pytest.raises(AttributeError, match=r"no attribute 'scale': use `service.call\(Engine.scale, ...\)`"):
        service.scale(3)  # type: ignore[attr-defined]  # the mistake under test
    with pytest.raises(AttributeError, match=r"no attribute 'doubled': use `service.get\('doubled'\)`"):
        _ = service.doubled  # type: ignore[attr-defined]  # the mistake under test
    with pytest.raises(AttributeError, match=r"if it is an attribute of the instance, use `service.get\('gain'\)`"):
        _ = service.gain  # type: ignore[attr-defined]  # the mistake under test
    with pytest.raises(TypeError, match=r"not callable: use `service.call\(Engine.__call__, ...\)`"):
        service(3)  # type: ignore[operator]  # the mistake under test
    with pytest.raises(TypeError, match="'scale' is not a method of Engine: name methods by the class"):
        service.call("scale", 3)  # type: ignore[call-overload]  # the mistake under test
    with pytest.raises(TypeError, match="is not a method of Engine"):
        service.call(Plain.add, 1, 2)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(AttributeError, match="no public method '_hidden'"):
        service.call(Engine._hidden)
    with pytest.raises(TypeError, match=r"Engine.count\(self, /, text: .*: missing a required argument: 'text'"):
        service.call(Engine.count)  # type: ignore[call-overload]  # the mistake under test


async def test_a_context_manager_is_entered_on_the_actors_thread_and_left(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with module_rt.spawn(Connection, path) as service:
        await service.call(Connection.note, "used")
        name = (await module_rt.info(service)).name
    assert path.read_text(encoding="utf-8") == f"entered on {name}\nused on {name}\nleft on {name}\n"


async def test_one_that_is_an_async_context_manager_as_well_is_entered_as_that(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with module_rt.spawn(BothWays, path):
        pass
    assert path.read_text(encoding="utf-8") == "entered later on MainThread\nleft later on MainThread\n"


async def test_a_group_of_services(module_rt: aiodaft.Runtime) -> None:
    async with module_rt.group(3, Engine, 2) as services:
        assert repr(services) == "<ServiceGroup of 3 Engine>"
        assert await services.all(Engine.scale, 5) == [11, 11, 11]
        assert await services.each(Engine.scale_later, [1, 2, 3]) == [2, 4, 6]
        assert await services.any(Engine.scale, services[0].call(Engine.scale_later, 5)) == 21
        assert [word async for word in services.any(Engine.words, "to be")] == ["to", "be"]
        assert [value async for value in services.map(Engine.scale, range(5))] == [1, 3, 5, 7, 9]
        assert await services[1].get("gain") == 2
        assert await services[:2].all(Engine.kind) == ["Engine", "Engine"]
        assert [await service.call(Engine.__len__) for service in services] == [2, 2, 2]
        await services.resize(2)
        assert len(services) == 2
        echo = await module_rt.spawn(Echo)
        travelled = await echo.echo(services)
        assert await travelled.all(Engine.scale, 1) == [3, 3]
        with pytest.raises(TypeError, match=r"Engine.words is a stream"):
            services.all(Engine.words, "no")
