"""Handles: torch tensors without data in the controller, whose operations run at the workers in blocks."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import os
import pickle
import random
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812 - its usual name
from tensor_workers import Extended, doubled  # noqa: E402
from tiny_gpt import GPT, batches, loss_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402

import aiodaft  # noqa: E402
from aiodaft import ActorDied  # noqa: E402
from aiodaft.tensor.handles import DistTensor  # noqa: E402
from aiodaft.tensor.loading import Workers, workers  # noqa: E402
from aiodaft.tensor.local_functions import local  # noqa: E402
from aiodaft.tensor.randoms import manual_seed  # noqa: E402
from aiodaft.tensor.recorder import immediate  # noqa: E402
from aiodaft.tensor.strategy import Strategy, first  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def w(shared_runtime: aiodaft.Runtime) -> AsyncIterator[Workers]:
    async with workers(shared_runtime, {"dp": 2, "tp": 2}, Extended) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def others(shared_runtime: aiodaft.Runtime) -> AsyncIterator[Workers]:
    async with workers(shared_runtime, {"tp": 3}) as made:
        yield made


def close(given: Any, want: Any) -> None:
    torch.testing.assert_close(given, want, rtol=1e-5, atol=1e-6)


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape)


async def value(handle: Any) -> Tensor:
    """The value of a handle, which checkers take for a plain tensor after an operation."""
    whole: Tensor = await handle
    return whole


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# Without a message.


async def test_shape_dtype_stride_and_placements_are_known_without_a_message(w: Any) -> None:
    x, y = w.put(numbers(7, 6), dp=Shard(0)), w.put(numbers(6, 5), tp=Shard(-1))
    await x
    sent = w.recorder.sent
    z = torch.relu(x @ y).t()
    assert (z.shape, z.dtype, z.stride(), z.device.type) == ((5, 7), torch.float32, (1, 5), "cpu")
    assert z.placements == {"dp": Shard(1), "tp": Shard(0)}
    assert repr(z) == f"{z}" == "<DistTensor (5, 7) float32: dp=S(1), tp=S(0)>"
    assert w.recorder.sent == sent
    close(await z, torch.relu(numbers(7, 6) @ numbers(6, 5)).t())


async def test_a_notebook_shows_the_part_of_each_rank(w: Any) -> None:
    html = w.put(numbers(4, 4), dp=Shard(0), tp=Shard(1))._repr_html_()
    assert "DistTensor (4, 4) float32: dp=S(0), tp=S(1)" in html
    assert html.count("<rect") == 4
    assert w.put(numbers(4, 4), dp=Shard(0))._repr_html_().count(">0, 1</text>") == 1


# Redistribution.


PAIRS = list(itertools.product(itertools.product(PLACEMENTS, repeat=2), repeat=2))


@pytest.mark.parametrize("pairs", [random.Random(3).sample(PAIRS, 40), pytest.param(PAIRS, marks=pytest.mark.programs)])
@pytest.mark.parametrize("shape", [(4, 6), (7, 5), (1, 3)])
async def test_any_placement_becomes_any_other_exactly(w: Any, shape: tuple[int, int], pairs: list[Any]) -> None:
    whole = numbers(*shape)
    sources = {source: w.put(whole, dp=source[0], tp=source[1]) for source, _ in pairs}
    moved = [sources[source].redistribute(dp=target[0], tp=target[1]) for source, target in pairs]
    for one, (_, target) in zip(moved, pairs, strict=True):
        assert tuple(one.placements.values()) == target
        assert torch.equal(await one, whole)


async def test_a_gradient_comes_back_in_the_placement_of_the_source(w: Any) -> None:
    x = w.put(numbers(6, 4), dp=Shard(0)).requires_grad_()
    y = x.redistribute(tp=Shard(1)) * 3
    y.sum().backward()
    assert isinstance(x.grad, DistTensor)
    assert x.grad.placements == x.placements
    assert torch.equal(await value(x.grad), torch.full((6, 4), 3.0))


async def test_gradients_through_redistributions_to_the_same_placements_have_memory_of_their_own(w: Any) -> None:
    a, b = (w.put(numbers(4, 2), dp=Shard(0)).requires_grad_() for _ in range(2))
    for _ in range(2):
        (a.redistribute(dp=Shard(0)) + b.redistribute(dp=Shard(0))).sum().backward()
    assert torch.equal(await value(a.grad), torch.full((4, 2), 2.0))
    assert torch.equal(await value(b.grad), torch.full((4, 2), 2.0))
    y = a * 2
    assert y.redistribute(dp=Shard(0)) is y
    saved = y * y
    y.redistribute(dp=Shard(0)).mul_(3)
    y.sum().backward(retain_graph=True)
    assert torch.equal(await value(a.grad), torch.full((4, 2), 8.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("target", [{}, {"tp": Shard(0)}, {"tp": Shard(1)}])
@pytest.mark.parametrize("source", [{"dp": Shard(0), "tp": Shard(0)}, {"tp": Partial()}, {"dp": Shard(1)}])
async def test_a_tensor_goes_to_another_group_and_back(
    w: Any, others: Any, source: dict[str, Any], target: dict[str, Any]
) -> None:
    whole = numbers(5, 4)
    y = await w.put(whole, **source).to(others, **target)
    assert y.placements == {"tp": Replicate()} | target
    assert torch.equal(await (y + 1), whole + 1)
    assert torch.equal(await (await y.to(w, dp=Shard(1), tp=Shard(0))), whole)


async def test_refs_are_the_parts_by_rank(w: Any) -> None:
    x = w.put(numbers(5, 2), dp=Shard(0), tp=Shard(1)) * 2
    parts = await x.refs()
    want = [part.contiguous() for rows in (numbers(5, 2) * 2).chunk(2) for part in rows.chunk(2, 1)]
    assert all(torch.equal(*pair) for pair in zip(parts, want, strict=True))


async def test_results_of_a_method_become_a_tensor(w: Any) -> None:
    x = await w.of(w.group.all(Extended.rows, [2, 2, 1, 1]), dp=Shard(0))
    assert x.shape == (3, 3)
    assert (await w.of(w.group.all(Extended.rows, [2] * 4), tp=Shard(-1))).shape == (2, 6)
    with pytest.raises(ValueError, match=r"S\(2\) cuts a dimension that a tensor with 2 has not"):
        await w.of(w.group.all(Extended.rows, [2] * 4), tp=Shard(2))
    assert torch.equal(await x, torch.tensor([0.0, 0.0, 2.0])[:, None].expand(3, 3))
    with pytest.raises(ValueError, match=r"the part of rank 3 is torch.float32 \(2, 3\); .* it has \(1, 3\)"):
        await w.of(w.group.all(Extended.rows, [2, 2, 1, 2]), dp=Shard(0))
    with pytest.raises(TypeError, match="the part of rank 0 is no tensor: 6"):
        await w.of(w.group.all(Extended.double, 3), dp=Shard(0))


async def test_tensors_are_made_at_the_workers(w: Any) -> None:
    x = w.zeros((3, 5), tp=Shard(1))
    assert torch.equal(await (x + 1), torch.ones(3, 5))
    assert w.empty((3,), torch.int64, dp=Shard(0)).dtype == torch.int64
    with pytest.raises(ValueError, match=r"S\(2\) cuts a dimension that a tensor with 2 has not"):
        w.put(numbers(2, 2), tp=Shard(2))
    with pytest.raises(ValueError, match="there is no axis pp: the axes are dp, tp"):
        w.put(numbers(2, 2), pp=Shard(0))


# Training.


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 5))


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


STRATEGIES = {
    "dp": Strategy(),
    "tp": Strategy(params={"0.*": {"tp": Shard(0)}, "3.weight": {"tp": Shard(1)}}, outputs={"3": {"dp": Shard(0)}}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
async def test_eager_training_equals_one_process(w: Any, strategy: str, optimizer: Any) -> None:
    alone = model()
    spread = w.distribute(copy.deepcopy(alone), STRATEGIES[strategy])
    given = [optimizer(one.parameters(), lr=0.05) for one in (alone, spread)]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in given]
    programs = []
    for k in range(4):
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(k)), torch.arange(8) % 5
        want = train(alone, given[0], x, y)
        close(await value(train(spread, given[1], w.put(x, dp=Shard(0)), w.put(y, dp=Shard(0)))), want)
        for one in schedules:
            one.step()
        programs.append((await w.group.all(Extended.counts))[0][1])
    # The rate is an argument: from the third step on, the program is one that the workers have.
    assert programs[2] == programs[3]
    for (name, one), other in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(one, nn.Parameter)
        assert one.grad is None
        wanted = dict(first(STRATEGIES[strategy].params, name) or {})
        assert cast("DistTensor", one).placements == {"dp": Replicate(), "tp": Replicate(), **wanted}
        close(await value(one), other.detach())


async def test_gradients_arrive_in_the_placement_of_their_parameters(w: Any) -> None:
    spread = w.distribute(model(), STRATEGIES["tp"])
    spread(w.put(numbers(8, 6), dp=Shard(0))).square().sum().backward()
    for one in spread.parameters():
        assert one.grad.placements == one.placements


async def test_a_block_in_parts_needs_two_all_reduces_in_each_direction(w: Any) -> None:
    parts = {
        "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
        "blocks.*.attn.out.weight": {"tp": Shard(1)},
        "blocks.*.up.*": {"tp": Shard(0)},
        "blocks.*.down.weight": {"tp": Shard(1)},
    }
    torch.manual_seed(0)
    alone = GPT(layers=2)
    spread = w.distribute(copy.deepcopy(alone), Strategy(params=parts))
    x, y = next(batches(1))
    await value(spread.head.weight)
    before, *_ = await w.group.all(Extended.collectives)
    loss = loss_of(spread, w.put(x, dp=Shard(0)), w.put(y, dp=Shard(0)))
    loss.backward()
    await value(spread.head.weight.grad)
    after, *_ = await w.group.all(Extended.collectives)
    assert after["tp"] - before["tp"] == 2 * (2 + 2)
    want = loss_of(alone, x, y)
    close(await value(loss), want.detach())
    want.backward()
    for one, other in zip(spread.parameters(), alone.parameters(), strict=True):
        close(await value(one.grad), other.grad)


async def test_functions_of_local_tensors_are_differentiable(w: Any) -> None:
    twice = local(doubled, whole=doubled, inputs=[{"tp": Shard(0)}], outputs=[{"tp": Shard(0)}])
    x = w.put(numbers(4, 2), tp=Shard(0)).requires_grad_()
    (y,) = twice(x)
    assert torch.equal(await y, 2 * numbers(4, 2))
    y.square().sum().backward()
    close(await x.grad, 8 * numbers(4, 2))


async def test_what_distribute_cannot_place_is_named(w: Any) -> None:
    with pytest.raises(ValueError, match="params: no name fits 'O.weight'; the nearest are .*0.weight"):
        w.distribute(model(), Strategy(params={"O.weight": {"tp": Shard(0)}}))
    with pytest.raises(ValueError, match="0.weight is on the device meta"):
        w.distribute(model().to("meta"), Strategy())
    spread = w.distribute(model(), Strategy())
    with pytest.raises(ValueError, match="0.weight is a distributed tensor already"):
        w.distribute(spread, Strategy())


# Random numbers.


async def test_random_numbers_are_those_of_one_process_for_each_placement(w: Any) -> None:
    whole = numbers(6, 5)

    def noisy(x: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(x, 0.5)
        return y, y * torch.rand_like(x), x.bernoulli(0.5), torch.nn.init.normal_(x.clone())

    with manual_seed(7, 2):
        want = noisy(whole)
    for placements in ({"dp": Shard(0)}, {"dp": Shard(1), "tp": Shard(1)}, {}):
        with manual_seed(7, 2):
            made = noisy(w.put(whole, **placements))
        for one, other in zip(made, want, strict=True):
            assert torch.equal(await value(one), other)


async def test_random_numbers_follow_the_generator_of_torch(w: Any) -> None:
    torch.manual_seed(1)
    x, y = w.randn((5, 4), tp=Shard(0)), w.randn((5, 4), tp=Shard(0))
    torch.manual_seed(1)
    again = w.randn((5, 4), dp=Shard(1))
    assert torch.equal(await x, await again)
    assert not torch.equal(await x, await y)


async def test_recomputation_draws_the_same(w: Any) -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(3)
        x = w.put(numbers(6, 5), dp=Shard(0)).requires_grad_()

        def part(x: Tensor) -> Tensor:
            return F.dropout(x, 0.5).square()

        y = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) if recompute else part(x)
        y.sum().backward()
        grads.append(await value(x.grad))
    assert torch.equal(*grads)
    assert grads[0].eq(0).any()


# Blocks.


async def test_a_block_that_was_seen_is_only_its_name(w: Any) -> None:
    x = w.put(numbers(4, 4), dp=Shard(0))
    # What other code has recorded.
    await x
    counts = []
    for k in range(3):
        assert torch.equal(await (x * float(k) + x), numbers(4, 4) * k + numbers(4, 4))
        counts.append(await w.group.all(Extended.counts))
    assert counts == [counts[0]] * 3


async def test_dropped_handles_free_their_tensors_with_the_next_block(w: Any) -> None:
    x = w.put(numbers(4, 4), dp=Shard(0))
    await (x + 1)
    (before, _), *_ = await w.group.all(Extended.counts)
    made = [x + float(k) for k in range(10)]
    await made[0]
    (during, _), *_ = await w.group.all(Extended.counts)
    del made
    await (x + 1)
    (after, _), *_ = await w.group.all(Extended.counts)
    assert (during - before, after - before) == (10 - 1, 0)


async def test_immediate_sends_each_operation(w: Any) -> None:
    x = w.put(numbers(4, 4))
    await x
    sent = w.recorder.sent
    with immediate():
        y = x + 1
        z = y * 2
        assert w.recorder.sent == sent + 2
    assert torch.equal(await z, (numbers(4, 4) + 1) * 2)


async def test_several_awaits_at_once_and_a_cancelled_one(w: Any) -> None:
    x = w.put(numbers(4, 4), dp=Shard(0))
    y, z = x + 1, x @ x

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(value(one)) for one in (y, z, y, x)]
        doomed = tasks.create_task(value(z))
        await asyncio.sleep(0)
        doomed.cancel()
    assert doomed.cancelled()
    whole = numbers(4, 4)
    for wait, want in zip(waits, [whole + 1, whole @ whole, whole + 1, whole], strict=True):
        close(wait.result(), want)
    close(await (z + y), whole @ whole + whole + 1)


# Plain values.


async def test_plain_tensors_are_the_same_everywhere(w: Any) -> None:
    whole = numbers(6, 4)
    x = w.put(whole, dp=Shard(0))
    row, number = numbers(4), torch.tensor(3.0)
    y = x + row
    row += 100
    assert torch.equal(await y, whole + numbers(4))
    assert torch.equal(await (x * number), whole * number)
    assert (x.int() * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="a plain tensor of 4,000,000 bytes .*workers.put"):
        x @ torch.zeros(4, 250_000)
    with pytest.raises(TypeError, match="writes a distributed tensor to a plain one"):
        torch.zeros(6, 4).add_(x)
    with pytest.raises(TypeError, match="aten.add.out writes a distributed tensor to a plain one"):
        torch.add(x, x, out=torch.empty(6, 4))


async def test_numbers_of_other_types_make_other_dtypes(w: Any) -> None:
    x = w.put(numbers(4, 4) > 0, dp=Shard(0))
    assert [(x * number).dtype for number in (True, 1, 1.0)] == [torch.bool, torch.int64, torch.float32]
    y = w.put(numbers(4, 4))
    assert torch.equal(
        await torch.where(y > 0, y, torch.tensor(0.5)), torch.where(numbers(4, 4) > 0, numbers(4, 4), 0.5)
    )
    for order in (2.0, float("inf"), 1.0, 2.0):
        close(await torch.linalg.vector_norm(y, order), torch.linalg.vector_norm(numbers(4, 4), order))


READERS: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: bool(x.sum() > 0),
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("reader", READERS)
async def test_code_that_needs_a_value_is_told_to_await_it(w: Any, reader: str) -> None:
    x = w.put(numbers(4, 4), dp=Shard(0))
    with pytest.raises(RuntimeError, match=r"needs the value of <DistTensor .*await it first, as `\(await x\)`"):
        READERS[reader](x)
    assert torch.equal(await x, numbers(4, 4))


async def test_shapes_that_depend_on_values_need_an_await(w: Any) -> None:
    x = w.put(numbers(4, 4), dp=Shard(0))
    for reader in (lambda: x.nonzero(), lambda: x[x > 0]):
        with pytest.raises(RuntimeError, match=r"the shape .* depends on a value: .*await it first"):
            reader()


async def test_a_handle_does_not_travel(w: Any) -> None:
    with pytest.raises(TypeError, match=r"stays in its process: pass on its `refs\(\)`"):
        pickle.dumps(w.put(numbers(2)))


async def test_tensors_of_two_groups_do_not_meet_in_an_operation(w: Any, others: Any) -> None:
    with pytest.raises(ValueError, match=r"tensors of several groups: move them to one, as `await x.to\(workers\)`"):
        w.put(numbers(2)) + others.put(numbers(2))


async def test_two_controllers_of_one_group_do_not_mix(w: Any) -> None:
    other = Workers(w.group)
    x, y = w.put(numbers(3)), other.put(numbers(3) * 2)
    a, b = x + 1, y + 1
    assert torch.equal(await a, numbers(3) + 1)
    assert torch.equal(await value(b), numbers(3) * 2 + 1)
    with pytest.raises(ValueError, match="tensors of several groups"):
        x + y


# Writes and views.


async def test_operations_in_place_and_views_are_those_of_torch(w: Any) -> None:
    whole = numbers(6, 4)
    x = w.put(whole, dp=Shard(0))
    view, same = x.t(), x.detach()
    assert x.add_(1.5) is x
    whole += 1.5
    assert torch.equal(await view, whole.t())
    view.mul_(2)
    whole *= 2
    assert torch.equal(await x, whole)
    assert torch.equal(await same, whole)
    x[:, 1:3] = 0
    whole[:, 1:3] = 0
    assert torch.equal(await x, whole)
    assert torch.equal(await view, whole.t())


async def test_operations_that_change_a_shape_in_place_change_that_of_the_handle(w: Any) -> None:
    x = w.put(numbers(6, 4), dp=Shard(0))
    y = x.unsqueeze_(0)
    assert y is x
    assert (x.shape, x.stride()) == ((1, 6, 4), (24, 4, 1))
    assert torch.equal(await (x * 2), numbers(1, 6, 4) * 2)
    assert torch.equal(await x.squeeze_(0).t_(), numbers(6, 4).t())
    assert x.transpose_(0, 1).swapaxes_(0, 1).shape == (4, 6)
    assert torch.equal(await x, numbers(6, 4).t())


async def test_a_filled_sum_is_not_a_sum_of_filled_terms(w: Any) -> None:
    x = w.put(numbers(4, 4), tp=Partial())
    assert torch.equal(await torch.empty_like(x).fill_(2), torch.full((4, 4), 2.0))


async def test_a_copy_of_parts_is_not_written_with_its_source(w: Any) -> None:
    x = w.put(numbers(4, 4))
    part = x.redistribute(dp=Shard(0))
    moved = x + w.put(numbers(4, 4), dp=Shard(0))
    x.zero_()
    again = x + w.put(numbers(4, 4), dp=Shard(0))
    assert torch.equal(await part, numbers(4, 4))
    assert torch.equal(await moved, numbers(4, 4) * 2)
    assert torch.equal(await again, numbers(4, 4))


async def test_a_write_that_needs_other_placements_is_an_error_only_if_a_view_is_there(w: Any) -> None:
    def summed() -> DistTensor:
        return w.put(numbers(4, 4), tp=Shard(1)) @ w.put(numbers(4, 4), tp=Shard(0))

    want = (numbers(4, 4) @ numbers(4, 4)).relu()
    x = summed()
    same = x.detach()
    x.relu_()
    assert x.placements == {"dp": Replicate(), "tp": Replicate()}
    close(await x, want)
    close(await value(same), want)
    x = summed()
    view = x.t()
    with pytest.raises(RuntimeError, match=r"aten.relu_.default writes .*aten.t.default at test_handles.py:\d+.*new"):
        x.relu_()
    close(await value(view), (numbers(4, 4) @ numbers(4, 4)).t())
    del view
    close(await value(x.relu_()), want)
    # Views of it from now on share its memory.
    x[0].add_(1)
    want[0] += 1
    close(await x, want)


async def test_a_write_to_a_view_that_was_redistributed_is_an_error(w: Any) -> None:
    x = w.put(numbers(7, 6), dp=Shard(0), tp=Shard(0))
    flat = x.view(42)
    with pytest.raises(RuntimeError, match=r"aten.add_.Tensor writes .*\(the tensor that it is a view of\)"):
        flat.add_(1)
    with pytest.raises(RuntimeError, match=r"aten.add_.Tensor writes .*aten.view.default at test_handles.py"):
        x.add_(1)
    del flat
    assert torch.equal(await x.add_(1), numbers(7, 6) + 1)


# Failures.


async def test_wrong_shapes_are_an_error_at_the_line_with_the_placements(w: Any) -> None:
    x = w.put(numbers(4, 6), dp=Shard(0))
    with pytest.raises(RuntimeError, match="must have same reduction dim, but got") as caught:
        x @ x
    assert "aten.mm.default of ((4, 6) float32: dp=S(0), tp=R); " in notes(caught.value)
    assert "at test_handles.py:" in notes(caught.value)
    assert torch.equal(await (x + x), numbers(4, 6) * 2)


async def test_a_failed_operation_fails_its_block_and_no_other(w: Any) -> None:
    before, bad = w.put(numbers(3)), w.put(torch.tensor([0, 99]))
    weight = w.put(numbers(4, 3))
    rows, line = F.embedding(bad, weight), inspect.stack()[0].lineno
    later = rows + 1
    before.add_(1)
    for one in (later, rows):
        with pytest.raises(IndexError, match="out of range") as caught:
            await value(one)
        assert f"recorded as aten.embedding.default at test_handles.py:{line}" in notes(caught.value)
        assert "at rank" in notes(caught.value)
    with pytest.raises(IndexError, match="out of range"):
        later * 2
    # The write came after the failure.
    assert torch.equal(await before, numbers(3))
    assert torch.equal(await (weight * 2), numbers(4, 3) * 2)


async def test_blocks_under_way_fail_with_the_first_error(w: Any) -> None:
    weight, bad = w.put(numbers(4, 3)), w.put(torch.tensor([0, 99]))
    with immediate():
        rows = F.embedding(bad, weight)
        other = weight + 1
        last = rows * 2
    for one in (other, last):
        with pytest.raises(IndexError, match="out of range"):
            await value(one)
    assert torch.equal(await (weight + 1), numbers(4, 3) + 1)


async def test_a_dead_worker_is_a_typed_error_and_new_workers_go_on(shared_runtime: aiodaft.Runtime) -> None:
    async with workers(shared_runtime, {"tp": 2}, Extended) as mortal:
        x = mortal.put(numbers(4, 4), tp=Shard(0))
        y = x.redistribute() + 1
        await value(y)
        pids = await mortal.group.all(Extended.pid)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(ActorDied):
            await value(x.redistribute() * 2)
        assert await mortal.heal() == [1]
        for late in (lambda: x + 1, lambda: x):
            with pytest.raises(RuntimeError, match="the workers have changed since these tensors were made"):
                await value(late())
        assert torch.equal(await value(mortal.put(numbers(4, 4), tp=Shard(0)) + 1), numbers(4, 4) + 1)
