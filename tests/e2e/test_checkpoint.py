"""Sharded states are saved in the background, and loaded in any layout, each rank its own bytes (FT4)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from each_transport import of_module, on_each_transport
from sharded import Rank, Reader, assert_has, loaded, whole_tensors

import aiodaft
from aiodaft import Refs, checkpoint
from aiodaft.resharding import Layout, Sharded, Sharding

pytestmark = pytest.mark.asyncio(loop_scope="module")

F32 = torch.float32
LAYERS = {f"layer{at}": (24, 18) for at in range(6)}


def placed(axes: dict[str, int], *, stages: bool = False) -> Layout:
    """Rows or columns over "tp", or the layers over "pp"; the norm and the number of steps are everywhere."""
    of_stage = {name: {"pp": at * axes.get("pp", 1) // len(LAYERS)} if stages else {} for at, name in enumerate(LAYERS)}
    dims = {name: {at % 2: "tp"} if "tp" in axes else {} for at, name in enumerate(LAYERS)}
    return Layout(
        axes,
        {
            **{
                name: Sharding(shape=shape, dtype=F32, dims=dims[name], only=of_stage[name])
                for name, shape in LAYERS.items()
            },
            "norm": Sharding(shape=(18,), dtype=torch.bfloat16),
            "step": Sharding(shape=(), dtype=torch.int64),
        },
    )


TRAINED, STAGED = placed({"dp": 2, "tp": 2}), placed({"pp": 3}, stages=True)
WHOLE = whole_tensors(
    {name: Sharding(shape=shape, dtype=F32) for name, shape in LAYERS.items()}
    | {"norm": Sharding(shape=(18,), dtype=torch.bfloat16), "step": Sharding(shape=(), dtype=torch.int64)}
)


shared_runtime, rt = on_each_transport, of_module


async def saved(rt: aiodaft.Runtime, path: Path) -> Sharded:
    trained = await rt.group(4, Rank, axes={"dp": 2, "tp": 2})
    state = Sharded(await loaded(trained, TRAINED, WHOLE), TRAINED)
    await (await checkpoint.save(state, path))
    return state


async def test_two_by_two_ranks_save_and_three_stages_go_on_bit_by_bit(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    here = rt.traffic().payload
    await saved(rt, tmp_path / "one")
    readers = await rt.group(3, Reader, axes={"pp": 3})
    await readers.all(Reader.count_reads)
    new = await checkpoint.load(tmp_path / "one", STAGED, to=readers, verify=False)
    await assert_has(readers, STAGED, WHOLE, new)
    # Each rank has read its bytes, and no others; none went through this process.
    assert await readers.all(Reader.reads) == [STAGED.nbytes(rank) for rank in range(3)]
    assert rt.traffic().payload == here
    # The ranks verify each part once, if that is not left out.
    await (await checkpoint.load(tmp_path / "one", STAGED, to=readers)).gather().ready()
    total = sum(tensor.nbytes for tensor in WHOLE.values())
    assert sum(await readers.all(Reader.reads)) == 2 * sum(map(STAGED.nbytes, range(3))) + total


async def test_a_layout_may_leave_out_tensors_and_cut_others_anywhere(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    await saved(rt, tmp_path / "one")
    layout = Layout(
        {"x": 2, "y": 2}, {"layer1": Sharding(shape=(24, 18), dtype=F32, dims={0: "y", 1: "x"}, lengths={1: (5, 13)})}
    )
    group = await rt.group(4, Reader)
    new = await checkpoint.load(tmp_path / "one", layout, to=group)
    await assert_has(group, layout, {"layer1": WHOLE["layer1"]}, new)


async def test_results_that_are_copies_are_saved_too(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    trained = await rt.group(4, Rank)
    await loaded(trained, TRAINED, WHOLE)
    await (await checkpoint.save(Sharded(trained.all(Rank.give), TRAINED), tmp_path / "deep" / "one"))
    one = Layout({"rank": 1}, {"layer0": Sharding(shape=(24, 18), dtype=F32)})
    group = await rt.group(1, Rank)
    await assert_has(
        group, one, {"layer0": WHOLE["layer0"]}, await checkpoint.load(tmp_path / "deep" / "one", one, to=group)
    )


async def test_a_shard_that_changes_before_its_end_is_no_checkpoint(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    trained = await rt.group(4, Rank)
    state = Sharded(await loaded(trained, TRAINED, WHOLE), TRAINED)
    await state.gather().ready()
    await trained[2].add(1)
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await (await checkpoint.save(state, tmp_path / "one"))
    assert os.listdir(tmp_path) == []


async def test_of_two_saves_to_one_path_one_is_refused(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    trained = await rt.group(4, Rank)
    state = Sharded(await loaded(trained, TRAINED, WHOLE), TRAINED)
    saves = [await checkpoint.save(state, tmp_path / "one") for _ in range(2)]
    done = await asyncio.gather(*saves, return_exceptions=True)
    assert {type(one) for one in done} == {type(None), FileExistsError}
    readers = await rt.group(3, Reader, axes={"pp": 3})
    await assert_has(readers, STAGED, WHOLE, await checkpoint.load(tmp_path / "one", STAGED, to=readers))
    assert os.listdir(tmp_path) == ["one"]


async def test_without_a_rank_that_is_killed_in_the_middle_there_is_nothing(
    rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    trained = await rt.on(restart="temporary").group(4, Reader)
    state = Sharded(await loaded(trained, TRAINED, WHOLE), TRAINED)
    await trained[3].end_in_write()
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await (await checkpoint.save(state, tmp_path / "one"))
    assert os.listdir(tmp_path) == []


async def test_bad_input_is_refused_before_anything_moves(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    state = await saved(rt, tmp_path / "one")
    with pytest.raises(FileExistsError, match="one exists: save each checkpoint to a path of its own"):
        await (await checkpoint.save(state, tmp_path / "one"))
    with pytest.raises(ValueError, match="there are 4 shards, and the layout has 3 ranks"):
        Sharded(state, STAGED)
    with pytest.raises(ValueError, match=r"'layer0' in the shard of rank 0 of the source is torch.float32 of shape"):
        await checkpoint.save(Sharded(state, placed({"tp": 4})), tmp_path / "two")
    refs: Any = Refs(state)
    with pytest.raises(TypeError, match=r"state is of Refs: give Sharded\(refs, layout\), or a Step of aiodaft.tensor"):
        await checkpoint.save(refs, tmp_path / "two")
    group = await rt.group(3, Reader)
    nothing: Any = group.all(Reader.reads)
    with pytest.raises(AttributeError, match="bytes_read"):
        # All ranks fail: one error is raised, and the others are seen.
        await checkpoint.save(Sharded(nothing, STAGED), tmp_path / "two")
    await group.all(Reader.count_reads)
    with pytest.raises(ValueError, match="the source has no tensor 'other'"):
        await checkpoint.load(tmp_path / "one", Layout({"x": 3}, {"other": Sharding(shape=(2,), dtype=F32)}), to=group)
    with pytest.raises(ValueError, match=r"'norm' is bfloat16 of shape \(18,\) in the source, and float32"):
        await checkpoint.load(tmp_path / "one", Layout({"x": 3}, {"norm": Sharding(shape=(18,), dtype=F32)}), to=group)
    with pytest.raises(ValueError, match="there are 3 members, and the layout has 4 ranks"):
        await checkpoint.load(tmp_path / "one", TRAINED, to=group)
    with pytest.raises(FileNotFoundError, match="two has no checkpoint"):
        await checkpoint.load(tmp_path / "two", STAGED, to=group)
    [file] = (tmp_path / "one").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match="half or corrupted"):
        await checkpoint.load(tmp_path / "one", STAGED, to=group)
    assert await group.all(Reader.reads) == [0, 0, 0]
