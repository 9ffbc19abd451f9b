"""Operations in parts give the values of one device, with any placements."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from operations_survey import (
    MESHES,
    Captured,
    Trial,
    Verification,
    captured,
    combinations,
    lowered,
    single_steps,
    tried,
)
from ranks_in_turn import run as run_ranks
from tensor_functions import FUNCTIONS, Function, normal, of, only
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import aiodaft.tensor.randoms  # noqa: F401 - registers its operation
from aiodaft.tensor.instructions import Slot
from aiodaft.tensor.lowering import Lowering
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Meta, Spec

THREE = {"a": 3}


def placed(function: Captured, *placements: Placement) -> dict[int, tuple[Placement, ...]]:
    """The first inputs like this, each on the only axis, and the others replicated."""
    return {number: (one,) for number, one in zip(function.free, placements, strict=False)}


def run(function: Function, *placements: Placement, axes: dict[str, int] = THREE) -> list[str]:
    """Compares each operation with torch; returns those that were done whole."""
    one = captured(function)
    return tried(one, placed(one, *placements), Rules(axes))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sample_of_functions_is_as_on_one_device(mesh: str) -> None:
    rules = Rules(MESHES[mesh])
    for name in random.Random(mesh).sample(sorted(FUNCTIONS), 12):
        function = captured(FUNCTIONS[name])
        for placements in combinations(function, rules.axes, at_most=1, seed=1):
            tried(function, placements, rules)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_functions_are_as_on_one_device(mesh: str) -> None:
    rules = Rules(MESHES[mesh])
    counts = {"in parts": 0, "partly whole": 0}
    for one in FUNCTIONS.values():
        function = captured(one)
        for placements in combinations(function, rules.axes, at_most=12, seed=2):
            counts["partly whole" if tried(function, placements, rules) else "in parts"] += 1
    print(f"{mesh}: {len(FUNCTIONS)} functions and their gradients: {counts}, wrong 0, refused 0")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_verified_operations_are_right_with_this_version_of_torch() -> None:
    verification = Verification()
    for mesh, axes in MESHES.items():
        for one in single_steps(map(captured, FUNCTIONS.values())):
            verification.add(mesh, one, axes, at_most=6, seed=0)
    rules = Rules(THREE)
    assert {key: reason for key, reason in verification.wrong.items() if rules.allows(*key)} == {}


def test_what_is_not_verified_is_done_whole() -> None:
    rules = Rules(THREE)

    assert rules.allows("aten.mm.default", "u")
    assert rules.allows("aten.add.Tensor", "sp")  # Parts along one axis, terms along another.
    assert not rules.allows("aten.fill_.Scalar", "rp")
    assert not rules.allows("aten.max_pool2d_with_indices.default", "e")
    assert not rules.allows("aten.no_such_operation.default", "s")


# Torch's own DTensor 2.13 gives other values for these. The right ones are in the tests.


def generated() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, 6, generator=generator), torch.randn(7, 6, generator=generator)]


@pytest.mark.parametrize(
    ("loss", "right", "of_torch"),
    [
        (F.mse_loss, 2.4077, 2.2316),
        (lambda x, y: F.smooth_l1_loss(x, y), 0.8044, None),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).float()), 0.8567, None),
        (lambda x, y: torch.linalg.vector_norm(x, dim=1).sum() + 0 * y.sum(), 15.839, 14.797),
    ],
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_losses_and_norms_of_uneven_parts_are_those_of_the_whole(
    loss: Callable[[Tensor, Tensor], Tensor], right: float, of_torch: float | None, placement: Placement
) -> None:
    x, y = generated()
    assert loss(x, y).item() == pytest.approx(right, abs=1e-3) != of_torch

    run(of(loss, lambda _: x.clone(), lambda _: y.clone()), placement, placement)


# What travels.

CLASSES = of(F.cross_entropy, normal(6, 12), lambda g: torch.randint(12, (6,), generator=g))


def test_cross_entropy_with_the_classes_in_parts_sends_some_numbers_for_each_row() -> None:
    function = captured(CLASSES)

    lowering = lowered(function, placed(function, Shard(1)), Rules(THREE)).lowering

    assert not lowering.whole
    rows = 6 * 4 * 2  # An all_reduce of one float for each row.
    assert {one.kind for one in lowering.collectives} == {"all_reduce"}
    assert all(max(one.received) <= rows for one in lowering.collectives)


@pytest.mark.parametrize("dim", [0, 1])
def test_attention_by_batch_or_by_head_sends_nothing(dim: int) -> None:
    heads = normal(2, 4, 8, 4)
    function = captured(of(F.scaled_dot_product_attention, heads, heads, heads))

    lowering = lowered(function, placed(function, *[Shard(dim)] * 4), Rules({"a": 2})).lowering

    assert not lowering.whole
    assert not lowering.collectives


def results(trial: Trial) -> list[tuple[Placement, ...]]:
    """The placements of the results of the last step."""
    last = trial.function.steps[-1]
    made = [number for number in last.values if number not in last.before]
    return [trial.lowering.spec(trial.numbers[number]).placements for number in made]


def test_an_embedding_with_rows_in_parts_sends_its_result() -> None:
    function = captured(only(lambda w, i: F.embedding(i, w), normal(7, 6), lambda g: torch.randint(7, (3, 4))))

    trial = lowered(function, placed(function, Shard(0)), Rules(THREE))

    assert not trial.lowering.whole
    assert results(trial) == [(Partial("sum"),)]


def test_pieces_of_a_fused_matrix_are_in_parts_as_it_was() -> None:
    function = captured(only(lambda x: x.split(4, dim=-1), normal(3, 12)))

    assert results(lowered(function, placed(function, Shard(1)), Rules({"a": 2}))) == [(Shard(1),)] * 3


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}])
def test_a_mean_of_uneven_parts_sends_one_number(axes: dict[str, int]) -> None:
    function = captured(only(torch.mean, normal(7, 6)))

    trial = lowered(function, {0: tuple(Shard(0) for _ in axes)}, Rules(axes))

    assert not trial.lowering.whole
    assert not trial.lowering.collectives
    assert results(trial) == [tuple(Partial("sum") for _ in axes)]


# Random numbers.


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_draws_its_part_of_a_random_tensor(dim: int) -> None:
    lowering = Lowering(Rules(THREE))
    draw = lowering.apply(torch.ops.aiodaft.random.default, ("normal", [7, 6], torch.float32, [0.0, 1.0], 5, 1, 0), {})
    part = lowering.redistribute(draw.number, (Shard(dim),))
    tables: dict[int, list[Tensor]] = {}

    run_ranks(lowering.instructions, tables, THREE)

    assert [one.kind for one in lowering.instructions] == ["op", "op"]
    assert torch.equal(torch.cat(tables[part], dim), tables[draw.number][0])


# Torch's table takes these dimensions for none of the tensor.
FROM_THE_END: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.cumsum(-1) * y,
    lambda x, y: x.cumprod(-2) * y,
    lambda x, y: x.logcumsumexp(-1) * y,
    lambda x, y: torch.ops.aten.slice_backward(x * y, [6, 8], -1, 0, 4, 1),
    lambda x, y: torch.ops.aten.select_backward(x * y, [6, 2, 4], -2, 1),
]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("function", FROM_THE_END)
def test_a_dimension_may_count_from_the_end(function: Callable[[Tensor, Tensor], Tensor], placement: Placement) -> None:
    run(of(function, normal(6, 4), normal(6, 4)), placement, placement, axes={"a": 2})


def test_a_mean_over_a_dimension_of_one_number_is_the_number() -> None:
    assert run(of(lambda x: x.mean(-1) + x.mean(0), lambda _: torch.tensor(2.0)), Replicate()) == []


def test_a_random_tensor_that_was_written_is_not_drawn_again() -> None:
    lowering = Lowering(Rules(THREE))
    draw = lowering.apply(torch.ops.aiodaft.random.default, ("normal", [7], torch.float32, [0.0, 1.0], 5, 1, 0), {})
    lowering.apply(torch.ops.aten.mul_.Scalar, (draw, 2.0), {})

    lowering.redistribute(draw.number, (Shard(0),))

    assert lowering.instructions[-1].kind == "chunk"


# Writes.


def test_a_write_to_a_view_of_a_gathered_copy_reaches_the_tensor() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        z = x.clone()
        row, column = z[2], z[:, 1]
        z[1:5].add_(y)
        row.mul_(3)
        return z + column[:, None] + row

    for placement in (Shard(0), Shard(1), Partial("sum"), Replicate()):
        run(of(write, normal(7, 6), normal(4, 6)), placement, Shard(1))


def test_a_write_ends_the_other_placements_of_a_tensor() -> None:
    def write(x: Tensor) -> Tensor:
        y = x.clone()
        first = y.cumsum(0)  # Needs all rows.
        y.mul_(2)
        return first + y.cumsum(0)

    run(only(write, normal(7, 6)), Shard(0))


def test_a_write_to_a_part_of_a_replica_leaves_the_replica() -> None:
    lowering = Lowering(Rules({"a": 2}))
    whole = lowering.new(Spec((Replicate(),), Meta((4,), (1,), torch.float32)))
    part = lowering.redistribute(whole, (Shard(0),))

    (slot,) = [lowering.apply(torch.ops.aten.mul_.Tensor, (Slot(part), 2.0), {})]

    assert slot == Slot(part)
    assert [one.target for one in lowering.instructions] == ["a", "aten.clone.default", "aten.mul_.Tensor"]


def test_an_operation_in_place_on_terms_of_a_sum_reduces_them_first() -> None:
    run(only(lambda x: x.sum(0).add_(1.0).sqrt_(), lambda g: torch.rand(7, 6, generator=g)), Shard(0))


# Placements.


def test_without_a_table_operations_are_done_whole() -> None:
    for name in ("linear", "cross_entropy", "layer_norm", "adamw"):
        function = captured(FUNCTIONS[name])
        assert tried(function, placed(function, Shard(0)), Rules(THREE, table="none"))


def test_a_torch_without_the_table_is_named_and_operations_are_done_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "aiodaft.tensor.table", None)

    rules = Rules(THREE)

    assert "operations are done whole, since torch 2" in caplog.text
    assert rules.place(torch.ops.aten.neg.default, (Spec((Shard(0),), Meta((7,), (1,), torch.float32)),), {}) is None


def test_any_placement_goes_to_any_other() -> None:
    axes = {"a": 2, "b": 2}
    function = captured(only(lambda x: x + 0, normal(5, 3)))
    for placements in combinations(function, axes, at_most=100, seed=0):
        lowering = lowered(function, placements, Rules(axes)).lowering
        for target in combinations(function, axes, at_most=100, seed=0):
            assert lowering.specs[lowering.redistribute(0, target[0])].placements == target[0]
