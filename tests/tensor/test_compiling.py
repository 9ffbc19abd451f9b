"""Local operations between collectives as functions that are compiled, or run as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lockstep import rows_of  # noqa: E402
from tensor_plans import alone, batch, mlp, start  # noqa: E402

from aiodaft.tensor.code import (  # noqa: E402
    Code,
    Routine,
    with_compiled,
)
from aiodaft.tensor.instructions import ByRank, Instruction, Slot  # noqa: E402


def routine(instructions: list[Instruction], *outputs: int) -> Routine:
    return Routine("step", (1, 2), tuple(instructions), outputs, causes=("its cause",) * len(instructions))


def op(target: str, out: int | None, *args: Any) -> Instruction:
    return Instruction("op", target, args, {}, (out,))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were given to the compiler, which runs them as they are; `None` in place of one fails."""
    graphs: list[Any] = []

    def compiler(graph: Any, *, dynamic: bool) -> Callable[..., Any]:
        assert not dynamic
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", compiler)
    return graphs


def test_a_step_in_segments_gives_what_it_gives_as_it_is(compiled: list[Any]) -> None:
    plan = mlp({"dp": 1}, {})
    whole = Routine("step", (0, 1, 2, 3), plan.instructions, tuple(one.slot for one in plan.outputs))
    made, segments = with_compiled(whole, 0, (3,))
    assert [one.kind for one in made.instructions] == [
        "local", "all_reduce", "local", "all_reduce", "all_reduce", "op", "op"
    ]  # fmt: skip
    assert len(compiled) == len(segments) == 2
    # The outputs are what later instructions take, and only that.
    assert [one.outs for one in made.instructions[:1]] == [(10, 11, 12, 30)]
    code, state, losses = Code(made, 0, rows_of({"dp": 1})[0]), start(), []
    for k in range(3):
        loss, up, down = code.run([state["up"], state["down"], batch(k), 0.1])
        losses.append(loss)
        state = {"up": up, "down": down}
    want, last = alone(start(), [0.1] * 3)
    torch.testing.assert_close(losses, want)
    torch.testing.assert_close(state, last)
    assert [one.reason for one in segments] == ["", ""]


def test_results_in_lists_and_arguments_by_rank_are_taken_over(compiled: list[Any]) -> None:
    instructions = [
        Instruction("op", "aten.split.Tensor", (Slot(1), 2), {}, (3, None)),
        Instruction("op", "aten.max.dim", (Slot(3), 0), {}, (4, 5)),
        op("aten.view.default", 6, Slot(4), ByRank(([1, 3], [3, 1]))),
        op("aten.add.Tensor", 7, Slot(6), Slot(2)),
    ]
    made, _ = with_compiled(routine(instructions, 7, 5), 1, ())
    x = torch.arange(12.0).view(4, 3)
    got, index = Code(made, 1, {}).run([x, torch.ones(())])
    assert got.tolist() == [[4.0], [5.0], [6.0]]
    assert index.tolist() == [1, 1, 1]
    assert len(compiled) == 1


def test_what_the_compiler_cannot_do_runs_as_it_is_written_with_the_reason(
    compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    instructions = [op("aten.neg.default", 3, Slot(1)), *(op("aten.exp.default", k + 1, Slot(k)) for k in (3, 4, 5))]
    made, (segment,) = with_compiled(routine(instructions, 6), 0, ())

    def failing(*args: Any) -> None:
        raise NotImplementedError("there is no compiler\nhere")

    segment.compiled = failing
    code = Code(made, 0, {})
    for _ in range(2):
        (got,) = code.run([torch.zeros(2), None])
        assert torch.equal(got, torch.exp(torch.exp(torch.exp(torch.zeros(2)))))
    assert segment.reason == "NotImplementedError: there is no compiler"
    assert caplog.messages == ["segment 0 of step is not compiled: NotImplementedError: there is no compiler"]


def test_the_error_of_an_operation_is_that_of_the_operation_and_stays_compiled(compiled: list[Any]) -> None:
    instructions = [
        *(op("aten.neg.default", k + 1, Slot(k)) for k in (2, 3, 4)),
        op("aten.mm.default", 6, Slot(1), Slot(5)),
    ]
    made, (segment,) = with_compiled(routine(instructions, 6), 0, ())
    code = Code(made, 0, {})
    with pytest.raises(RuntimeError) as caught:
        code.run([torch.ones(2, 3), torch.ones(2, 3)])
    assert caught.value.__notes__ == [
        "raised by aten.mm.default (instruction 3) of segment 0 of step at rank 0, of its cause"
    ]
    assert segment.reason == ""
    assert code.run([torch.ones(2, 3), torch.ones(3, 2)])[0].tolist() == [[-3.0, -3.0]] * 2


@pytest.mark.parametrize(("written", "read"), [(6, 7), (7, 6), (7, 8)])
def test_tensors_that_change_with_another_one_are_in_no_segment(compiled: list[Any], written: int, read: int) -> None:
    instructions = [
        *(op("aten.neg.default", k + 1, Slot(k)) for k in (2, 3, 4, 5)),
        op("aten.t.default", 7, Slot(6)),
        op("aten.t.default", 8, Slot(6)),
        op("aten.mul_.Tensor", None, Slot(written), 2),
        op("aten.add.Tensor", 9, Slot(read), Slot(read)),
    ]
    made, _ = with_compiled(routine(instructions, 9), 0, ())
    assert {one.kind for one in made.instructions if {written, read} & set(one.outs)} == {"op"}
    (got,) = Code(made, 0, {}).run([None, torch.ones(2, 2)])
    assert got.tolist() == [[4.0, 4.0]] * 2
