"""Collectives on refs (rows GC2, GC3, MP2): right values, at their members, in any order of issue."""

from __future__ import annotations

import asyncio
import random
from functools import reduce
from typing import Any

import numpy
import pytest
import torch
from collective_actors import Member, longest, made
from inside import producer_of
from keyed_members import Keyer
from torch import Tensor

import aiodaft
from aiodaft import ActorDied, Ref
from aiodaft.collectives import OfAll
from aiodaft.tensor import aggregation
from aiodaft.tensor.aggregation import Encoder, Int8, median

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALGORITHMS: Any = ("exchange", "star", "shared", "direct", "ring", "tree", "doubling")
# 68 KB, which four members cannot divide evenly.
LARGE = (131, 131)


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def in_order(values: list[Tensor]) -> Tensor:
    return reduce(torch.add, values)


def same(values: list[Any], expected: Any) -> bool:
    return all(torch.equal(value, expected) for value in values)


async def test_all_members_get_the_sum_in_the_order_of_ranks(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(4, Member))
    shapes: list[tuple[int, ...]] = [(), (3,), (0, 2), LARGE]
    for shape in shapes:
        expected = in_order([made(seed, *shape) for seed in range(4)])
        for algorithm in (None, "exchange", "star", "shared", "direct"):
            refs = [member.make(seed, *shape) for seed, member in enumerate(members)]
            assert same(await aiodaft.all_reduce(refs, algorithm=algorithm), expected)


@pytest.mark.parametrize("count", [1, 3])
async def test_every_algorithm_gives_all_members_the_same_bits(rt: aiodaft.Runtime, count: int) -> None:
    members = list(await rt.group(count, Member))

    async def total(algorithm: Any) -> list[Tensor]:
        refs = [member.make(seed, *LARGE) for seed, member in enumerate(members)]
        return await aiodaft.all_reduce(refs, algorithm=algorithm)

    for algorithm in ALGORITHMS:
        first = await total(algorithm)
        torch.testing.assert_close(first[0], in_order([made(seed, *LARGE) for seed in range(count)]))
        assert same([*first, *await total(algorithm)], first[0])


async def test_results_are_at_their_members_and_nothing_passes_the_caller(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    # The values do not exist yet: the algorithm is chosen without their size.
    refs = [member.make(seed, 300, 300) for seed, member in enumerate(members)]
    before = rt.traffic()
    results = aiodaft.all_reduce(refs)
    await asyncio.gather(*(result.ready() for result in results))
    after = rt.traffic()
    assert (after.payload_received, after.payload_sent) == (before.payload_received, before.payload_sent)
    assert [producer_of(result) for result in results] == [producer_of(ref) for ref in refs]
    assert len({producer_of(result) for result in results}) == 3
    # They are refs as any other: arguments, and members of the next collective.
    again = aiodaft.all_reduce([member.give(result) for member, result in zip(members, results, strict=True)], "max")
    assert same(await again, (await results)[0])


async def test_reducers_of_numbers_tensors_and_arrays(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(4, Member))
    reducers: list[tuple[Any, int]] = [("sum", 10), ("product", 24), ("min", 1), ("max", 4)]
    for op, expected in reducers:
        for whole in (int, float):
            numbers = [member.give(whole(rank + 1)) for rank, member in enumerate(members)]
            assert await aiodaft.all_reduce(numbers, op) == [whole(expected)] * 4
        tensors = [member.give(torch.tensor([rank + 1, 1])) for rank, member in enumerate(members)]
        assert same(await aiodaft.all_reduce(tensors, op), torch.tensor([expected, 4 if op == "sum" else 1]))
        arrays = [member.give(numpy.array([[rank + 1.0]])) for rank, member in enumerate(members)]
        for algorithm in ("exchange", "shared", "direct"):
            for found in await aiodaft.all_reduce(arrays, op, algorithm=algorithm):
                assert found.dtype == numpy.float64
                assert found.tolist() == [[float(expected)]]


async def test_what_an_op_has_no_meaning_for_is_refused_and_the_collective_named(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(2, Member))
    values = [[1], "one", numpy.array(["one"]), torch.eye(2).to_sparse(), torch.eye(300).to_sparse()]
    for value in values:
        for ref in aiodaft.all_reduce([member.give(value) for member in members], algorithm="exchange"):
            with pytest.raises(
                TypeError, match="'sum' is for numbers, dense .*: give a function of two values"
            ) as info:
                await ref
            assert "raised for all_reduce" in info.value.__notes__
    pairs = [member.give([rank, "x"]) for rank, member in enumerate(members)]
    assert await aiodaft.all_reduce(pairs, "max") == [[1, "x"]] * 2
    scalars = await aiodaft.all_reduce([member.give(numpy.float32(1)) for member in members])
    assert [type(scalar) for scalar in scalars] == [numpy.float32] * 2
    # Values without a size in bytes are gathered, and reduced by a function.
    sparse = [member.give(torch.eye(300).to_sparse()) for member in members]
    for gathered in await aiodaft.all_gather(sparse):
        assert all(torch.equal(one.to_dense(), torch.eye(300)) for one in gathered)
    for total in await aiodaft.all_reduce(sparse, torch.add):
        assert torch.equal(total.to_dense(), 2 * torch.eye(300))


async def test_a_function_of_ones_own_reduces_whole_values(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    words = ["to", "thine", "own"]

    def refs() -> list[Ref[str]]:
        return [member.give(word) for member, word in zip(members, words, strict=True)]

    assert await aiodaft.all_reduce(refs(), longest) == ["thine"] * 3
    assert await aiodaft.all_reduce(refs(), lambda first, second: f"({first} {second})") == ["((to thine) own)"] * 3
    assert await aiodaft.reduce(refs(), longest, root=1) == "thine"
    with pytest.raises(ValueError, match="ring combines parts of values, and a function is for whole ones"):
        aiodaft.all_reduce([members[0].give("x")], longest, algorithm="ring")


@pytest.mark.parametrize("algorithm", [None, "exchange", "star"])
async def test_an_op_of_all_gets_all_values_once_in_the_order_of_ranks(rt: aiodaft.Runtime, algorithm: Any) -> None:
    members = list(await rt.group(3, Member))
    refs = [member.make(seed, *LARGE) for seed, member in enumerate(members)]
    found = await aiodaft.all_reduce(refs, OfAll(median), algorithm=algorithm)
    assert same(found, torch.stack([made(seed, *LARGE) for seed in range(3)]).median(0).values)
    assert (
        await aiodaft.reduce([member.give(word) for member, word in zip(members, "abc", strict=True)], OfAll(len)) == 3
    )


async def test_an_op_of_all_gets_parts_to_scatter_and_is_not_for_pairs(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    refs = [member.make(seed, 7, 2) for seed, member in enumerate(members)]
    rows = torch.stack([made(seed, 7, 2) for seed in range(3)]).median(0).values.tensor_split(3)
    for part, expected in zip(await aiodaft.reduce_scatter(refs, OfAll(median)), rows, strict=True):
        assert torch.equal(part, expected)
    for algorithm in ("tree", "ring"):
        with pytest.raises(ValueError, match=rf"{algorithm} never has all .* OfAll\(.*: use star or exchange"):
            aiodaft.all_reduce(refs, OfAll(median), algorithm=algorithm)
    with pytest.raises(TypeError, match=r"OfAll\(function=3\): a function of the list of all values is needed"):
        aiodaft.all_reduce(refs, OfAll(3))  # type: ignore[arg-type,type-var]  # no function


async def test_members_that_meet_have_to_have_the_same_op_of_all(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Keyer)
    found = await group.all(Keyer.on_tensor, "all_reduce", LARGE, op=OfAll(median))
    assert same(found, torch.stack([made(seed, *LARGE) for seed in range(3)]).median(0).values)
    ops = [OfAll(median), OfAll(aggregation.total), OfAll(median)]
    wrong = [member.do("all_reduce", torch.ones(1), op) for member, op in zip(group, ops, strict=True)]
    for error in await asyncio.gather(*wrong, return_exceptions=True):
        assert "disagree: rank" in str(error)
        assert "aiodaft.tensor.aggregation.median" in str(error)


async def test_codes_are_added_up_where_they_are_wanted(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    codes = [Encoder(Int8()).encode(made(seed, 600, 600)) for seed in range(3)]
    refs = [member.give(code) for member, code in zip(members, codes, strict=True)]
    await asyncio.gather(*(ref.ready() for ref in refs))
    before = [await member.received() for member in members]
    sums = aiodaft.all_reduce(refs, OfAll(aggregation.total), algorithm="exchange")
    await asyncio.gather(*(ref.ready() for ref in sums))
    # A byte for each element of the others, and the scales.
    assert [await member.received() - one for member, one in zip(members, before, strict=True)] == [
        2 * (600 * 600 + 4)
    ] * 3
    assert same(await sums, in_order([code.decode() for code in codes]))


async def test_parameters_give_plain_tensors(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(2, Member))
    for total in await aiodaft.all_reduce([member.weights(7, 9) for member in members], algorithm="shared"):
        assert not total.requires_grad
        assert torch.equal(total, made(7, 9) + made(7, 9))


async def test_reduce_and_reduce_scatter(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    for shape in [(7, 2), LARGE]:
        refs = [member.make(seed, *shape) for seed, member in enumerate(members)]
        expected = in_order([made(seed, *shape) for seed in range(3)])
        whole = aiodaft.reduce(refs, root=2)
        assert torch.equal(await whole, expected)
        assert producer_of(whole) == producer_of(refs[2])
        parts = aiodaft.reduce_scatter(refs)
        assert [producer_of(part) for part in parts] == [producer_of(ref) for ref in refs]
        for part, rows in zip(await parts, torch.tensor_split(expected, 3), strict=True):
            assert torch.equal(part, rows)


async def test_gather_scatter_broadcast(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    members = list(group)
    refs: list[Ref[Any]] = [members[0].give("word"), members[1].give([1, 2]), members[2].make(5, *LARGE)]
    for word, numbers, tensor in [*await aiodaft.all_gather(refs), await aiodaft.gather(refs, root=1)]:
        assert (word, numbers) == ("word", [1, 2])
        assert torch.equal(tensor, made(5, *LARGE))
    items = aiodaft.scatter(members[0].parts([1, 0, 20_000], 2.0), group)
    assert [producer_of(item) for item in items] == [producer_of(ref) for ref in refs]
    assert [item.shape[0] for item in await items] == [1, 0, 20_000]
    copies = aiodaft.broadcast(rt.put(made(1, *LARGE)), group)
    assert [producer_of(copy) for copy in copies] == [producer_of(ref) for ref in refs]
    assert same(await copies, made(1, *LARGE))


async def test_a_broadcast_stores_a_tensor_as_it_came(rt: aiodaft.Runtime) -> None:
    source, other = await rt.group(2, Member)
    plain = made(1, *LARGE)
    weights = torch.nn.Parameter(made(2, *LARGE))
    for tensor in (plain, plain.bfloat16(), plain > 0, weights, made(3, 131, 140).T, made(4, 3), made(5, 0, 2)):
        ref = source.give(tensor)
        # The second time, the memory of the source is mapped already.
        for _ in range(2):
            (copy,) = aiodaft.broadcast(ref, [other])
            got = await copy
            assert (type(got), got.dtype, got.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
            assert torch.equal(got, tensor)
            kind = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"
            assert tensor.numel() < 100 or kind in copy._repr_html_()
            # It is another tensor, of its own process.
            await other.zero(copy)
            assert torch.equal(await other.give(copy), tensor)
        assert torch.equal(await ref, tensor)


async def test_all_to_all_of_different_sizes(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    sizes = [[1, 2, 3], [0, 20_000, 1], [4, 0, 0]]
    refs = [member.parts(row, float(rank)) for rank, (member, row) in enumerate(zip(members, sizes, strict=True))]
    for rank, got in enumerate(await aiodaft.all_to_all(refs)):
        for source, part in enumerate(got):
            assert torch.equal(part, torch.full((sizes[source][rank],), float(source)))


@pytest.mark.timeout(120)
async def test_opposite_orders_and_shared_members_for_500_rounds(rt: aiodaft.Runtime) -> None:
    """Failures 1, 3 and 7 of gloo: collectives that SPMD programs must issue in one order may be issued in any."""
    members = list(await rt.group(4, Member))
    source = random.Random(15)
    under_way: list[tuple[Any, list[Any]]] = []
    for _ in range(500):
        chosen = source.sample(range(4), source.randint(2, 4))
        # Every member makes its two values in an order of its own, and so do the collectives.
        first, second = [source.randrange(100) for _ in chosen], [source.randrange(100) for _ in chosen]
        made_in_order = [source.sample([first[i], second[i]], 2) for i in range(len(chosen))]
        made_refs = [{value: members[rank].give(value) for value in pair}
                     for rank, pair in zip(chosen, made_in_order, strict=True)]  # fmt: skip
        wanted = [[refs[value] for refs, value in zip(made_refs, values, strict=True)] for values in (first, second)]
        for values, refs in source.sample(list(zip((first, second), wanted, strict=True)), 2):
            under_way.append((aiodaft.all_reduce(refs, algorithm=source.choice(ALGORITHMS)), [sum(values)] * len(refs)))
        if len(under_way) > 20:
            source.shuffle(under_way)
            for results, expected in under_way:
                assert await results == expected
            under_way.clear()
    for results, expected in under_way:
        assert await results == expected


async def test_no_member_asks_for_a_value_that_another_one_makes_or_stores(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(2, Member))
    await asyncio.gather(*(member.count_questions() for member in members))
    # 1 MiB each.
    stored, makes = ([member.make(seed, 512, 512) for seed, member in enumerate(members)] for _ in range(2))
    await asyncio.gather(*(ref.ready() for ref in stored))
    for refs in (stored, makes):
        copies, totals = aiodaft.broadcast(refs[0], members), aiodaft.all_reduce(refs)
        assert same(await copies, made(0, 512, 512))
        assert same(await totals, in_order([made(0, 512, 512), made(1, 512, 512)]))
    assert await asyncio.gather(*(member.count_questions() for member in members)) == [0, 0]


async def test_a_collective_that_waits_holds_up_no_other(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(2, Member))
    slow = aiodaft.all_reduce([members[0].after_gate(1), members[1].give(2)])
    assert await aiodaft.all_reduce([member.give(5) for member in members]) == [10, 10]
    assert not any(result.done() for result in slow)
    await members[0].open_gate()
    assert await slow == [3, 3]


async def test_members_that_disagree_all_get_an_error(rt: aiodaft.Runtime) -> None:
    """Failures 2 and 5 of gloo, where the processes abort."""
    members = list(await rt.group(3, Member))
    cases = [(torch.zeros(3, 2), r"float32 \(3, 2\)"), (torch.zeros(2, 3).double(), "float64"), (1, "int")]
    for algorithm in ALGORITHMS:
        for other, kind in cases:
            refs = [members[0].make(0, 2, 3), members[1].make(1, 2, 3), members[2].give(other)]
            for result in aiodaft.all_reduce(refs, algorithm=algorithm):
                with pytest.raises(ValueError, match=rf"all_reduce: the members disagree: .*rank 2 has [a-z.]*{kind}"):
                    await result
    assert await aiodaft.all_reduce([member.give(1) for member in members]) == [3, 3, 3]


async def test_an_error_of_one_value_is_that_of_every_result(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))
    for algorithm in ALGORITHMS:
        results = aiodaft.all_reduce(
            [members[0].make(0, 4), members[1].fail(), members[2].make(2, 4)], algorithm=algorithm
        )
        for result in results:
            with pytest.raises(LookupError, match="no gradient"):
                await result


async def test_a_death_ends_the_collective_and_leaves_the_others_usable(rt: aiodaft.Runtime) -> None:
    """Failure 6 of gloo: there the group cannot be used any more."""
    doomed, *others = [await rt.spawn(Member) for _ in range(3)]
    results = aiodaft.all_reduce([doomed.die(), *(other.make(1, *LARGE) for other in others)])
    for result in results:
        with pytest.raises(ActorDied, match="Member"):
            await result
    assert same(await aiodaft.all_reduce([other.make(1, *LARGE) for other in others]), made(1, *LARGE) * 2)


async def test_a_compiled_graph_takes_in_the_steps(rt: aiodaft.Runtime) -> None:
    members = list(await rt.group(3, Member))

    def step(seed: Any) -> list[Ref[Tensor]]:
        return list(aiodaft.all_reduce([member.make(seed, 40, 1000) for member in members]))

    graph = aiodaft.compile(step)
    for seed in (3, 4):
        assert same(await asyncio.gather(*graph(seed)), in_order([made(seed, 40, 1000)] * 3))


async def test_wrong_arguments_are_refused_at_the_line(rt: aiodaft.Runtime) -> None:
    member = await rt.spawn(Member)
    refs = [member.give([1])]
    with pytest.raises(ValueError, match="a collective needs at least one ref"):
        aiodaft.all_reduce([])
    with pytest.raises(TypeError, match="takes refs, one for each member, not int"):
        aiodaft.all_gather([1])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ValueError, match="op is one of sum, product, min, max, or a function"):
        aiodaft.all_reduce(refs, "avg")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="algorithm is one of exchange, star"):
        aiodaft.all_reduce(refs, algorithm="best")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="root is the rank of one of 1 members, from 0, not 1"):
        aiodaft.gather(refs, root=1)
    with pytest.raises(ValueError, match="no actors to give a value to"):
        aiodaft.broadcast(refs[0], [])
    for item in aiodaft.scatter(refs[0], [member, member]):
        with pytest.raises(ValueError, match=r"scatter: expected a list or tuple of 2 items, not of 1"):
            await item
    with pytest.raises(TypeError, match="reduce_scatter: expected a tensor or an array to be cut, not list"):
        await aiodaft.reduce_scatter(refs)


@pytest.mark.timeout(120)
async def test_over_tcp_members_send_parts() -> None:
    async with aiodaft.Runtime(transport="tcp") as rt:
        members = list(await rt.group(3, Member))
        before = rt.traffic()
        refs = [member.make(seed, *LARGE) for seed, member in enumerate(members)]
        results = aiodaft.all_reduce(refs)
        scattered = aiodaft.reduce_scatter(refs)
        exchanged = aiodaft.all_to_all([member.parts([20_000, 1, 2], 3.0) for member in members])
        everything = [
            *results,
            *scattered,
            *exchanged,
            *aiodaft.scatter(members[0].parts([1, 30_000], 1.0), members[:2]),
        ]
        await asyncio.gather(*(ref.ready() for ref in everything))
        assert rt.traffic().payload_received == before.payload_received
        expected = in_order([made(seed, *LARGE) for seed in range(3)])
        assert same(await results, expected)
        assert torch.equal(torch.cat(await scattered), expected)
        assert [len(part) for part in (await exchanged)[0]] == [20_000] * 3
