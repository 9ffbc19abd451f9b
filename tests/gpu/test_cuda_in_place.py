"""Memory that the user has, on a GPU or pinned for it: `into`, `borrow`, `register`: `pytest -m gpu`."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch
from cuda_actors import GpuKeeper
from on_gpu import MIB, ON_ONE_LOOP, all_given_back, keepers

import aiodaft

pytestmark = ON_ONE_LOOP


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_runtime: aiodaft.Runtime) -> list[GpuKeeper]:
    """Two actors on one GPU, for all tests."""
    return await keepers(shared_runtime, 2)


async def test_into_writes_rows_columns_and_parameters_and_nothing_beside(shared: list[GpuKeeper]) -> None:
    a, _ = shared
    base = torch.zeros(4, MIB, device="cuda")
    row = base[2]
    version = base._version
    assert await a.make(MIB, 5.0).into(row) is row
    assert base._version > version
    assert torch.equal(base.sum(1), torch.tensor([0.0, 0.0, 5.0 * MIB, 0.0], device="cuda"))
    wide = torch.zeros(MIB, 2, device="cuda")
    await a.make(MIB, 6.0).into(wide[:, 1])
    assert torch.equal(wide.sum(0), torch.tensor([0.0, 6.0 * MIB], device="cuda"))
    parameter = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    await a.make(MIB, 7.0).into(parameter)
    assert parameter.min() == parameter.max() == 7.0
    assert parameter.is_leaf


async def test_into_comes_from_memory_of_the_host_and_goes_to_it(shared: list[GpuKeeper]) -> None:
    a, _ = shared
    for pinned in (False, True):
        target = torch.zeros(MIB, pin_memory=pinned)
        await a.make(MIB, 5.0).into(target)
        assert target.min() == target.max() == 5.0
        assert target.is_pinned() == pinned
    on_gpu = torch.zeros(MIB, device="cuda")
    for make in (a.make_pinned, a.make_for_the_host):
        await make(MIB, 6.0).into(on_gpu)
        assert on_gpu.min() == on_gpu.max() == 6.0
        on_gpu.zero_()


async def test_into_what_a_value_does_not_fit_is_refused_and_the_value_stays(shared: list[GpuKeeper]) -> None:
    a, b = shared
    await all_given_back(a)
    ref = a.make(MIB, 8.0)
    for target in (
        torch.zeros(MIB - 1, device="cuda"),
        torch.zeros(MIB, 1, device="cuda"),
        torch.zeros(MIB, dtype=torch.float16, device="cuda"),
        torch.zeros(MIB, dtype=torch.int32),
    ):
        with pytest.raises(ValueError, match="cannot be written into a tensor of shape"):
            await ref.into(target)
        assert not target.any()
    with pytest.raises(ValueError, match="expanded tensor"):
        await ref.into(torch.zeros(1, device="cuda").expand(MIB))
    with pytest.raises(TypeError, match="a meta tensor"):
        await ref.into(torch.zeros(MIB, device="meta"))
    with pytest.raises(TypeError, match="`into` writes a tensor into a tensor"):
        await a.traffic().into(torch.zeros(MIB, device="cuda"))
    assert (await b.where(ref))[2] == 8.0 * MIB
    del ref
    await all_given_back(a)


async def test_actors_lend_to_each_other_and_to_the_controller(shared: list[GpuKeeper]) -> None:
    for lender, reader in (shared, shared[::-1]):
        await all_given_back(lender)
        ref = lender.lend(64 * MIB, 4.0)
        # Read at the same time by two processes.
        there, here = await asyncio.gather(reader.where(ref), ref)
        assert there[2] == float(here.sum()) == 4.0 * 64 * MIB
        # A value that has come is the reader's own.
        here.zero_()
        assert (await reader.where(ref))[2] == 4.0 * 64 * MIB
        del here
        await ref.released()
        # Released: the owner may write to it, and lend it again.
        await lender.overwrite(8.0)
        again = lender.lend_again()
        assert (await reader.where(again))[2] == 8.0 * 64 * MIB
        await again.ready()
        await lender.overwrite(1.0)
        with pytest.raises(aiodaft.exceptions.BorrowError):
            await reader.where(again)


async def test_a_lent_part_of_a_tensor_is_read_where_it_lies(shared: list[GpuKeeper]) -> None:
    a, b = shared
    await all_given_back(a)
    ref = a.lend_part(16 * MIB, 2.0, 1000, 5000)
    _, _, total = await b.where(ref)
    assert total == 2.0 * 4000
    target = torch.zeros(4000, device="cuda")
    await ref.into(target)
    assert target.min() == target.max() == 2.0


async def test_pinned_tensors_travel_as_tensors_of_the_host(shared: list[GpuKeeper]) -> None:
    a, b = shared
    before = await a.traffic()
    assert await a.where((torch.ones(MIB) * 3.0).pin_memory()) == ("cpu", "", 3.0 * MIB)
    ref = a.make_pinned(MIB, 2.0)
    assert await b.where(ref) == ("cpu", "", 2.0 * MIB)
    assert float((await ref).sum()) == 2.0 * MIB
    # The snapshot was made when the method returned.
    await a.overwrite(7.0)
    assert await b.where(ref) == ("cpu", "", 2.0 * MIB)
    payload, direct = [now - earlier for now, earlier in zip(await a.traffic(), before, strict=True)]
    assert payload > 0
    assert direct == 0


async def test_registering_a_pinned_tensor_works_and_one_of_a_gpu_needs_none(shared: list[GpuKeeper]) -> None:
    a, _ = shared
    with pytest.raises(ValueError, match=r"not one on cuda:0 \(one on a GPU needs no preparation"):
        aiodaft.memory.register(torch.zeros(MIB, device="cuda"))
    pinned = torch.zeros(MIB, pin_memory=True)
    with aiodaft.memory.register(pinned):
        await a.make_pinned(MIB, 5.0).into(pinned)
        assert pinned.min() == pinned.max() == 5.0
        assert await a.where(pinned) == ("cpu", "", 5.0 * MIB)


async def test_who_only_reads_gets_no_copy(shared: list[GpuKeeper]) -> None:
    a, b = shared
    ref, lent = a.make(64 * MIB, 2.0), a.lend(64 * MIB, 3.0)
    for reader in (b, a, b):
        assert await reader.peek(ref) == (2.0 * 64 * MIB, pytest.approx(0, abs=1 << 20))
    assert await b.peek(lent) == (3.0 * 64 * MIB, pytest.approx(0, abs=1 << 20))
    # A tensor that this process passes.
    assert (await b.peek(torch.full((MIB,), 4.0, device="cuda")))[0] == 4.0 * MIB
    await lent.released()
    del ref
    await all_given_back(a)


async def test_what_is_read_stays_until_the_gpu_has_read_it(shared: list[GpuKeeper]) -> None:
    a, b = shared
    await all_given_back(a)
    await b.peek_late(a.make(64 * MIB, 1.0))
    # Each of them may get the memory of the one before.
    for value in range(2, 6):
        await b.where(a.make(64 * MIB, float(value)))
    assert await b.let_go() == 64.0 * MIB
    await all_given_back(a)


async def test_what_a_reader_keeps_outlives_who_made_it(
    shared: list[GpuKeeper], shared_runtime: aiodaft.Runtime
) -> None:
    _, b = shared
    async with shared_runtime.scope() as scope:
        (a,) = await keepers(scope, 1)
        await b.hold_on(a.make(64 * MIB, 7.0))
        lent = a.lend(MIB, 5.0)
        await b.hold_on(lent)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await lent.released()
        assert await b.let_go() == 5.0
        await lent.released()
        await b.hold_on(a.make(64 * MIB, 7.0))
        await shared_runtime.kill(a)
    assert await b.let_go() == 7.0
    assert (await b.where(torch.ones(MIB, device="cuda")))[2] == MIB


async def test_a_write_to_what_is_only_to_be_read_is_an_error(shared: list[GpuKeeper]) -> None:
    a, b = shared
    with pytest.raises(
        aiodaft.exceptions.BorrowError, match=r"break_promise is declared @read_only, but wrote to .* args\[0\]"
    ):
        await b.break_promise(a.make(MIB, 1.0))
