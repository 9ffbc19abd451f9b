"""The way of large values: by the runtime's choice, the method's, or that of one value."""

from __future__ import annotations

import pytest
import torch
from actors import Echo
from inside import peer_of
from makers import SIZE, Maker
from receiving import Receiver

import aiodaft
from aiodaft_transport import Unreachable


def opened(rt: aiodaft.Runtime) -> set[str]:
    """Transports that this process has used."""
    return set(peer_of(rt).store.transports)


@pytest.mark.parametrize("name", ["by_tcp", "by_tcp_on_thread"])
async def test_a_method_chooses_how_its_results_travel(name: str) -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        maker = await rt.spawn(Maker)
        if peer_of(rt).store.transport.name == "shm":
            assert len(await maker.usual()) == SIZE
            assert "tcp" not in opened(rt)
        assert await getattr(maker, name)() == bytes(SIZE)
        assert "tcp" in opened(rt)
        assert rt.traffic().payload_received >= SIZE


async def test_a_value_chooses_how_it_travels() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        echo = await rt.spawn(Echo)
        assert await echo.echo(rt.put(bytes(SIZE), transport="tcp")) == bytes(SIZE)
        assert "tcp" in opened(rt)


async def test_an_impossible_choice_is_refused_where_it_is_made(rt: aiodaft.Runtime) -> None:
    maker = await rt.spawn(Maker)
    with pytest.raises(Unreachable, match="no transport 'pigeon'; there are"):
        maker.by_pigeon()
    with pytest.raises(Unreachable, match="no transport 'pigeon'"):
        rt.put(1, transport="pigeon")
    assert len(await maker.usual()) == SIZE


async def test_the_environment_chooses_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODAFT_TRANSPORT", "tcp")
    async with aiodaft.Runtime(preload=()) as rt:
        maker = await rt.spawn(Maker)
        assert await maker.usual() == bytes(SIZE)
        assert opened(rt) == {"tcp"}
    monkeypatch.setenv("AIODAFT_TRANSPORT", "pigeon")
    with pytest.raises(Unreachable, match="pigeon"):
        aiodaft.Runtime()


async def test_memory_that_is_mapped_is_fetched_without_a_task() -> None:
    async with aiodaft.Runtime(transport="shm", preload=("torch",)) as rt:
        sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
        value = torch.ones(50_000)
        # The memory is mapped at the first use.
        await receiver.total(value)
        await receiver.total(sender.ones(50_000))
        await receiver.count_tasks()
        await receiver.total(value)
        assert await receiver.count_tasks() == 0
        total = receiver.total(sender.ones_once_opened(50_000))
        # The call is there before its argument.
        await receiver.count_tasks()
        await sender.open()
        assert await total == 50_000
        assert await receiver.count_tasks() == 0
