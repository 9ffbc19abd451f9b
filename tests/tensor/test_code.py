"""Instructions as one function for each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import format_exception
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lockstep import rows_of, run_ranks  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from aiodaft.tensor.code import _OF_TORCH, Code, Routine, _quickest, chunks  # noqa: E402
from aiodaft.tensor.instructions import ByRank, Instruction, Slot, operation  # noqa: E402


@dataclass
class At:
    slot: int


@dataclass
class Small:
    """A plan of instructions alone."""

    axes: dict[str, int]
    inputs: list[At]
    instructions: list[Instruction]
    outputs: list[At]


def small(axes: dict[str, int], inputs: Sequence[int], instructions: list[Instruction], *outputs: int) -> Small:
    return Small(axes, [At(n) for n in inputs], instructions, [At(n) for n in outputs])


def op(target: str, out: int | tuple[int | None, ...], *args: Any, **kwargs: Any) -> Instruction:
    return Instruction("op", target, args, kwargs, out if isinstance(out, tuple) else (out,))


def along(kind: Any, axis: str, out: int, *args: Any) -> Instruction:
    return Instruction(kind, axis, args, {}, (out,))


X, W, V, Y, Z = map(Slot, range(1, 6))


def test_an_mlp_with_weights_in_parts_gives_the_values_and_gradients_of_one_process() -> None:
    x, up, down = torch.randn(5, 4), torch.randn(4, 7), torch.randn(7, 3)
    plan = small(
        {"tp": 3},
        [1, 2, 3],
        [
            op("aten.mm.default", 4, X, W),
            op("aten.relu.default", 5, Y),
            op("aten.mm.default", 6, Z, V),
            along("all_reduce", "tp", 7, Slot(6), "sum"),
            # Backward of the sum: the gradient of the output is one.
            op("aten.ones_like.default", 8, Slot(7)),
            op("aten.t.default", 9, Z),
            op("aten.mm.default", 10, Slot(9), Slot(8)),
            op("aten.t.default", 11, V),
            op("aten.mm.default", 12, Slot(8), Slot(11)),
            op("aten.threshold_backward.default", 13, Slot(12), Z, 0),
            op("aten.t.default", 14, W),
            op("aten.mm.default", 15, Slot(13), Slot(14)),
            along("all_reduce", "tp", 16, Slot(15), "sum"),
        ],
        7, 10, 16,
    )  # fmt: skip
    given = [[x, *parts] for parts in zip(chunks(up, 3, 1), chunks(down, 3, 0), strict=True)]
    ranks = run_ranks(plan, given)
    want = [one.clone().requires_grad_() for one in (x, up, down)]
    y = (want[0] @ want[1]).relu() @ want[2]
    y.sum().backward()
    for got, _, gx in ranks:
        torch.testing.assert_close(got, y.detach())
        torch.testing.assert_close(gx, want[0].grad)
    torch.testing.assert_close(torch.cat([one[1] for one in ranks]), want[2].grad)
    # Each rank has the same bits.
    assert all(torch.equal(one[0], ranks[0][0]) for one in ranks)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8])
def test_parts_of_any_length_are_those_of_chunk_and_come_together_again(n: int, length: int) -> None:
    x = torch.arange(2.0 * length).view(2, length)
    plan = small(
        {"a": n},
        [1],
        [
            along("chunk", "a", 2, X, 1),
            along("all_gather", "a", 3, Slot(2), 1),
            along("all_to_all", "a", 4, Slot(2), 1, 0),
            along("all_gather", "a", 5, Slot(4), 0),
            along("partition", "a", 6, X, "sum"),
            along("reduce_scatter", "a", 7, Slot(6), 1, "sum"),
            along("reduce_scatter", "a", 8, X, 1, "avg"),
        ],
        2, 3, 4, 5, 7, 8,
    )  # fmt: skip
    ranks = run_ranks(plan, [[x]] * n)
    want = [*torch.chunk(x, n, 1), *[x[:, :0]] * n][:n]
    for rank, (part, whole, turned, again, scattered, averaged) in enumerate(ranks):
        assert torch.equal(part, want[rank])
        assert torch.equal(whole, x)
        assert torch.equal(turned, chunks(x, n, 0)[rank])
        assert torch.equal(again, x)
        assert torch.equal(scattered, want[rank])
        assert torch.equal(averaged, want[rank])


@pytest.mark.parametrize(("op", "want"), [("sum", 6.0), ("avg", 2.0), ("min", 1.0), ("max", 3.0), ("product", 6.0)])
def test_terms_are_reduced_by_each_operation(op: str, want: float) -> None:
    plan = small({"a": 3}, [1], [along("all_reduce", "a", 2, X, op)], 2)
    assert [one[0].tolist() for one in run_ranks(plan, [[torch.tensor([k + 1.0])] for k in range(3)])] == [[want]] * 3


@pytest.mark.parametrize("power", ["2.0", "1.0", "3.0", "inf", "-inf", "0.0"])
def test_norms_of_parts_make_the_norm_of_the_whole(power: str) -> None:
    x = torch.tensor([3.0, -4.0, 0.0, 12.0, 5.0])
    plan = small({"a": 2}, [1], [along("all_reduce", "a", 2, X, f"norm:{power}")], 2)
    parts = [[torch.linalg.vector_norm(part, float(power))] for part in chunks(x, 2, 0)]
    for (got,) in run_ranks(plan, parts):
        torch.testing.assert_close(got, torch.linalg.vector_norm(x, float(power)))


@pytest.mark.parametrize("length", [4, 6, 10])
def test_strided_parts_are_those_of_each_block(length: int) -> None:
    x = torch.arange(3.0 * length).view(3, length)
    instructions = [along("chunk", "a", 2, X, 1, 2), along("all_gather", "a", 3, Slot(2), 1, 2)]
    ranks = run_ranks(small({"a": 2}, [1], instructions, 2, 3), [[x]] * 2)
    blocks = x.view(3, 2, length // 2)
    for rank, (part, whole) in enumerate(ranks):
        assert torch.equal(part, torch.cat([chunks(blocks[:, k], 2, 1)[rank] for k in range(2)], 1))
        assert torch.equal(whole, x)


def test_rows_of_an_embedding_in_parts_sum_to_those_of_the_whole() -> None:
    weight, index = torch.randn(7, 2), torch.tensor([[0, 6], [3, 4]])
    instructions = [along("embedding", "a", 3, X, W, 7), along("all_reduce", "a", 4, V, "sum")]
    plan = small({"a": 5}, [1, 2], instructions, 4)
    for (got,) in run_ranks(plan, [[part, index] for part in chunks(weight, 5, 0)]):
        assert torch.equal(got, weight[index])
    with pytest.raises(IndexError, match=r"-1 to 2, the rows are 0 to 6"):
        run_ranks(plan, [[part, torch.tensor([2, -1])] for part in chunks(weight, 5, 0)])


def test_several_tensors_travel_as_one() -> None:
    split = Instruction("split", None, (Slot(4), [[2], [], [1, 2]]), {}, (5, 6, 7))
    instructions = [
        Instruction("join", None, ([X, W, V],), {}, (3 + 10,)),
        along("all_reduce", "a", 4, Slot(13), "sum"),
        split,
    ]
    x, w, v = torch.ones(2), torch.tensor(2.0), torch.full((1, 2), 3.0)
    for got in run_ranks(small({"a": 2}, [1, 2, 3], instructions, 5, 6, 7), [[x, w, v]] * 2):
        assert all(torch.equal(one, 2 * want) for one, want in zip(got, (x, w, v), strict=True))


def test_axes_are_rows_of_their_own_and_arguments_differ_by_rank() -> None:
    axes = {"dp": 2, "tp": 3}
    instructions = [
        op("aten.full.default", 1, [1], ByRank((1.0, 2.0, 3.0, 10.0, 20.0, 30.0))),
        along("all_reduce", "tp", 2, X, "sum"),
        along("all_reduce", "dp", 3, X, "sum"),
    ]
    ranks = run_ranks(small(axes, [], instructions, 2, 3), [[]] * 6)
    assert [(int(a), int(b)) for a, b in ranks] == [(6, 11), (6, 22), (6, 33), (60, 11), (60, 22), (60, 33)]


def test_a_tensor_ends_with_its_last_use_and_a_collective_is_waited_for_at_its_first() -> None:
    instructions = [
        op("aten.neg.default", 2, X),
        along("all_reduce", "a", 3, Slot(2), "sum"),
        op("aten.abs.default", 4, X),
        op("aten.add.Tensor", 5, Slot(3), Slot(4), alpha=2),
        op("aten.split.Tensor", (6, None), Slot(5), 1),
    ]
    code = Code(Routine("step", (1, 9), tuple(instructions), (6,)), 0, rows_of({"a": 1})[0])
    plain = re.sub(r"_\d+\(", "(", code.source)
    assert plain.splitlines() == [
        "def program(values, update):",
        "    v1, _, = values",
        "    _ = values.clear()",
        "    v2 = aten_neg_default(v1)",
        "    v3 = a(v2, 'sum')",
        "    del v2",
        "    v4 = aten_abs_default(v1)",
        "    del v1",
        "    v3 = v3.result()",
        "    v5 = aten_add_Tensor(v3, v4, alpha=2)",
        "    del v3, v4",
        "    v6, _, = aten_split_Tensor(v5, 1)",
        "    del v5, _",
        "    return (v6, )",
    ]


def test_a_write_waits_for_the_collectives_under_way_and_comes_after_the_update() -> None:
    instructions = [
        along("all_gather", "a", 3, X, 0),
        op("aten.mul_.Tensor", 4, X, W),
    ]
    plan = small({"a": 2}, [1, 2], instructions, 3, 4)
    for whole, part in run_ranks(plan, [[torch.ones(2), 5.0], [torch.ones(2), 7.0]]):
        assert whole.tolist() == [1.0] * 4
        assert part.tolist() in ([5.0] * 2, [7.0] * 2)
    said = []
    x = torch.ones(2)
    code = Code(Routine("step", (1, 2), tuple(instructions[1:]), (4,)), 0, {})
    code.run([x, 3.0], lambda: said.append(x.tolist()))
    assert said == [[1.0, 1.0]]
    assert x.tolist() == [3.0, 3.0]


def test_a_donated_input_ends_after_the_update_is_said() -> None:
    instructions = [
        op("aten.neg.default", 2, X),
        op("aten.add.Tensor", 3, Slot(2), X),
        op("aten.abs.default", 4, Slot(3)),
    ]
    code = Code(Routine("step", (1,), tuple(instructions), (4,), donated=frozenset({1})), 0, {})
    assert code.source.index("update()\n") < code.source.index("aten_add") < code.source.index("del v1, v2")
    assert Code(Routine("step", (1,), tuple(instructions), (4,)), 0, {}).source.count("update()") == 0


def test_the_error_of_an_operation_names_rank_instruction_and_cause() -> None:
    instructions = [op("aten.neg.default", 2, X), op("aten.mm.default", 3, Slot(2), X)]
    routine = Routine("step", (1,), tuple(instructions), (3,), causes=("", "blocks.0 (gpt.py:7)"))
    with pytest.raises(RuntimeError) as caught:
        Code(routine, 2, {}).run([torch.ones(2, 3)])
    assert caught.value.__notes__ == [
        "raised by aten.mm.default (instruction 1) of step at rank 2, of blocks.0 (gpt.py:7)"
    ]
    # The statement is in its frames.
    assert "aten_mm_default" in "".join(format_exception(caught.value))


def test_numbers_that_are_no_literals_are_constants() -> None:
    instructions = [
        op("aten.full_like.default", 2, X, float("-inf"), dtype=torch.float64),
        op("aten.clamp.default", 3, X, None, float("inf")),
    ]
    ((low, same),) = run_ranks(small({}, [1], instructions, 2, 3), [[torch.ones(2)]])
    assert low.dtype == torch.float64
    assert low.tolist() == [float("-inf")] * 2
    assert same.tolist() == [1.0] * 2


def test_functions_of_the_user_see_local_tensors() -> None:
    instructions = [Instruction("local", "twice", (X,), {}, (2,)), Instruction("local", "both", (X,), {}, (3, None))]
    functions = {"twice": lambda x: (x + x,), "both": lambda x: (x - 1, x)}
    plan = small({"a": 2}, [1], instructions, 2, 3)
    ranks = run_ranks(plan, [[torch.tensor(1.0)], [torch.tensor(2.0)]], functions)
    assert [[float(one) for one in rank] for rank in ranks] == [[2.0, 0.0], [4.0, 1.0]]


def test_a_view_of_a_part_copies_where_its_strides_are_others() -> None:
    instructions = [along("chunk", "a", 2, X, 0), op("aten.t.default", 3, Slot(2)), op("aten.view.default", 4, V, [-1])]
    ranks = run_ranks(small({"a": 2}, [1], instructions, 4), [[torch.arange(8.0).view(4, 2)]] * 2)
    assert [one[0].tolist() for one in ranks] == [[0.0, 2.0, 1.0, 3.0], [4.0, 6.0, 5.0, 7.0]]


class Seen(TorchDispatchMode):
    """The overloads that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


A, M, S = torch.rand(3, 3) + 1, torch.rand(2, 3, 3), 0.5
ADDED, SCALED = ((A, A), (A, S), (A, A, {"alpha": S})), ((A, A), (A, S), (A, 2))
FUSED = (A, A, A), (A, A, A, {"value": -S})
SUMMED = (A, [0]), (A, [0, 1], True), (A, None), (A, [0], {"dtype": torch.float64})
CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "add.Tensor": ADDED, "sub.Tensor": ADDED, "add_.Tensor": ADDED, "sub_.Tensor": ADDED,
    "mul.Tensor": SCALED, "div.Tensor": SCALED, "mul_.Tensor": SCALED,
    "addcmul_.default": FUSED, "addcdiv_.default": FUSED, "sum.dim_IntList": SUMMED, "mean.dim": SUMMED,
    "mm.default": ((A, A),), "bmm.default": ((M, M),),
    "addmm.default": ((A[0], A, A), (A, A, A, {"beta": 2, "alpha": S})),
    "transpose.int": ((A, 0, 1), (A, -1, -2)), "unsqueeze.default": ((A, -1),),
    "reshape.default": ((A, [9]), (A.t(), [-1])),
    "native_layer_norm.default": ((A, [3], A[0], A[0], 1e-5), (A, [3], None, None, 1e-5)),
    "_softmax.default": ((A, 1, False),), "lerp_.Scalar": ((A, A, S),),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_OF_TORCH))
def test_the_faster_function_of_an_operation_calls_its_overload(name: str) -> None:
    overload = operation(f"aten.{name}")
    for given in CALLS.get(name, ((A,),)):
        kwargs = given[-1] if isinstance(given[-1], dict) else {}
        results, names = [], []
        for function in (_quickest(overload), overload):
            args = [one.clone() if isinstance(one, torch.Tensor) else one for one in given[: len(given) - bool(kwargs)]]
            with Seen() as seen, torch.no_grad():
                results.append(function(*args, **kwargs))
            names.append(seen.names)
        assert _quickest(overload) is not overload
        assert names[0] == names[1]
        torch.testing.assert_close(*results, rtol=0, atol=0)
