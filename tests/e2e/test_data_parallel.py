"""Data-parallel training: losses against one process, the overlap of gradients, and the memory of ZeRO-3."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from data_parallel import TOLERANCE, difference, make, replicas_step, train, train_in_one
from dp_ranks import LAYERS, Batch, Rank, Replica, Shard
from run_example import run_example
from traced import TraceFile

import aiodaft

pytestmark = pytest.mark.programs

RANKS, SIZE, STEPS = 2, 5, 3  # 3 sequences and 2


@pytest.fixture(scope="module")
def losses_of_one() -> list[float]:
    return train_in_one(SIZE, STEPS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["ddp", "zero1", "zero3"])
async def test_ranks_with_uneven_batches_compute_what_one_process_computes(
    variant: str, losses_of_one: list[float]
) -> None:
    async with aiodaft.Runtime() as rt:
        ranks = await make(rt, variant, RANKS)
        losses = await train(ranks, variant, SIZE, STEPS)
        assert rt.traffic().payload == 0
        peaks = await ranks.all(Shard.peak_bytes) if variant == "zero3" else []
    assert difference(losses, losses_of_one) <= TOLERANCE
    assert losses[-1] < losses[0]
    layers = [vector.nbytes for vector in Rank().vectors]
    assert all(layer % (4 * RANKS) == 0 for layer in layers)
    assert peaks == ([sum(layers) // RANKS + max(layers)] * RANKS if variant == "zero3" else [])


class PatientReplica(Replica):
    """Goes on to the first layer in `backward` only when the last one's combined gradient is here."""

    def __init__(self) -> None:
        super().__init__("ddp")
        self.came = threading.Event()

    def announce(self, layer: int) -> None:
        if layer == 0:
            self.came.wait()
        super().announce(layer)

    @aiodaft.method
    async def take(self, gradient: torch.Tensor, layer: int) -> None:
        await super().take(gradient, layer)
        if layer == LAYERS - 1:
            self.came.set()


@pytest.mark.timeout(120)
async def test_gradients_are_combined_while_backward_runs(tmp_path: Path) -> None:
    tokens = torch.arange(32).view(2, 16)
    parts: list[Batch] = [(row[None], row[None]) for row in tokens]
    async with aiodaft.Runtime() as rt, rt.group(2, PatientReplica) as ranks:
        async with rt.trace(tmp_path / "run.json"):
            assert await replicas_step(ranks, parts, tokens.numel(), "ddp") > 0
        assert all(early > 0 for early in await ranks.all(PatientReplica.early_gradients))
    file = TraceFile(tmp_path / "run.json")
    learning = [one for one in file.slices if one["name"] == "PatientReplica.learn"]
    assert len(learning) == 2
    for learn in learning:
        steps = [one for one in file.slices if one["cat"] == "collective" and one["pid"] == learn["pid"]]
        # Of the last layer, whose gradient is there first: combined in the time of `learn`.
        begun = [one for one in steps if one["name"] == "all_reduce" and learn["ts"] < one["ts"]]
        assert any(one["ts"] + one["dur"] < learn["ts"] + learn["dur"] for one in begun)


@pytest.mark.timeout(120)
def test_the_whole_program_trains_and_records_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    output = run_example("data_parallel.py", "--ranks", "2", "--steps", "2", "--trace", str(path))
    assert "no loss differs by more than" in output
    assert "the controller: 0 payload bytes" in output
    # The two steps of both ranks.
    assert len([one for one in TraceFile(path).of("call") if one.endswith("Replica.learn")]) == 4


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", ["ddp", "zero1", "zero3"])
def test_sixty_steps_on_four_ranks_equal_those_of_one_process(variant: str) -> None:
    assert "no loss differs by more than" in run_example("data_parallel.py", "--variant", variant)
