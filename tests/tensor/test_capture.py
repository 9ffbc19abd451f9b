"""Ordinary torch code as a program: what it runs is what one process does, bit by bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, batches, loss_of, train  # noqa: E402

from aiodaft.tensor.capture import capture  # noqa: E402
from aiodaft.tensor.operations import Gradient, Mark, Operation  # noqa: E402


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return GPT()


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_steps(step: Any, model: Any, optimizer: Any, data: Any, after: Any = lambda: None) -> Any:
    """The program of a step and the step itself, in turns, give the same results and parameters."""
    data = list(data)
    program = capture(step, model, optimizer, *data[0])
    values = program.values(model.state_dict())
    for one in data:
        torch.testing.assert_close(program.run(values, *one), step(model, optimizer, *one), rtol=0, atol=0)
        after()
    for name, tensor in model.state_dict().items():
        assert torch.equal(values[program.aliases.get(name, name)], tensor), name
    return program


def test_twenty_steps_of_adamw_are_bitwise_those_of_one_process(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    assert_same_steps(train, model, optimizer, batches(20), schedule.step)


def test_a_capture_leaves_model_and_optimizer_as_they_were(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    before, parameters = state_of(model), list(model.parameters())
    attributes = {module: dict(vars(module)) for module in model.modules()}
    groups = [dict(group) for group in optimizer.param_groups]
    capture(train, model, optimizer, *next(batches(1)))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(one.grad is None for one in parameters)
    assert {module: dict(vars(module)) for module in model.modules()} == attributes
    assert not any(
        vars(module)[kind] for module in model.modules() for kind in ("_forward_hooks", "_forward_pre_hooks")
    )
    assert optimizer.param_groups == groups
    assert not optimizer.state
    assert not vars(optimizer)["_optimizer_step_pre_hooks"]


def test_a_model_without_data_has_the_same_program(model: Any) -> None:
    x, y = next(batches(1))
    with torch.device("meta"):
        empty = GPT()
    programs = [capture(train, one, torch.optim.AdamW(one.parameters()), x, y) for one in (model, empty)]
    assert programs[0].operations == programs[1].operations
    assert programs[0].inputs == programs[1].inputs


def test_each_operation_says_its_module_line_and_phase(model: Any) -> None:
    program = capture(train, model, torch.optim.AdamW(model.parameters()), *next(batches(1)))
    lines = {
        (one.cause.module, one.cause.line.partition(":")[0], one.cause.phase)
        for one in program.operations
        if isinstance(one, Operation)
    }
    assert {("blocks.0.attn.q", "tiny_gpt.py", phase) for phase in ("forward", "backward")} <= lines
    assert {file for _, file, _ in lines} == {"tiny_gpt.py"}
    by_line: dict[str, set[str]] = {}
    for one in program.operations:
        if isinstance(one, Operation):
            by_line.setdefault(one.cause.phase, set()).add(one.cause.line)
    assert len(by_line["backward"] - by_line["forward"]) == 1  # the gradient of the loss is made by `loss.backward()`
    assert len(by_line["update"]) == 1


def test_marks_stand_at_the_ends_of_modules_and_of_their_gradients(model: Any) -> None:
    program = capture(train, model, torch.optim.AdamW(model.parameters()), *next(batches(1)))
    marks = Counter(
        (one.side, one.gradient) for one in program.operations if isinstance(one, Mark) and one.module == "blocks.1"
    )
    assert marks == {("in", False): 1, ("in", True): 1, ("out", False): 1, ("out", True): 1}
    outs = {one.out for one in program.operations if isinstance(one, Mark) and not one.gradient}
    assert all(one.forward in outs for one in program.operations if isinstance(one, Mark) and one.gradient)
    gradients = [one.parameter for one in program.operations if isinstance(one, Gradient)]
    assert gradients == [name for name, _ in model.named_parameters()]


def test_only_the_update_writes_and_costs_what_torch_does_for_one_tensor(model: Any) -> None:
    program = capture(train, model, torch.optim.AdamW(model.parameters()), *next(batches(1)))
    operations = [one for one in program.operations if isinstance(one, Operation)]
    assert {one.cause.phase for one in operations if str(one.target).split(".")[1].endswith("_")} == {"update"}
    update = Counter(str(one.target) for one in operations if one.cause.phase == "update")
    count = len(list(model.parameters()))
    each = ("mul_.Tensor", "lerp_.Scalar", "mul_.Tensor", "addcmul_.default", "sqrt.default", "div.Tensor")
    each += ("add_.Tensor", "addcdiv_.default")
    assert all(update[f"aten.{name}"] == count * each.count(name) for name in each)
    assert sum(update.values()) - count * len(each) == 13  # the numbers, once for all parameters
    assert [one.name for one in program.inputs if one.name.startswith("step")] == ["step/optimizer.0"]


def test_inference_takes_and_gives_trees(model: Any) -> None:
    def logits(models: dict[str, Any], batch: dict[str, Any], scale: float) -> Any:
        out = models["gpt"](batch["x"])
        return {"logits": out * scale, "name": "gpt", "parts": [out.sum(), None]}

    x, _ = next(batches(1))
    program = capture(logits, {"gpt": model}, {"x": x}, 0.5)
    assert [one.name for one in program.inputs if one.role == "argument"] == ["batch.x"]
    got = program.run(program.values(model.state_dict()), {"x": x}, 0.5)
    wanted = logits({"gpt": model}, {"x": x}, 0.5)
    assert torch.equal(got["logits"], wanted["logits"])
    assert got["name"] == "gpt"
    assert torch.equal(got["parts"][0], wanted["parts"][0])
    assert got["parts"][1] is None
    with pytest.raises(TypeError, match="scale is 0.25"):
        program.arguments.bind({"x": x}, 0.25)
    with pytest.raises(ValueError, match=r"batch.x is \(2, 8\)"):
        program.arguments.bind({"x": x[:2]}, 0.5)


def test_a_loss_can_be_taken_without_an_optimizer(model: Any) -> None:
    x, y = next(batches(1))
    program = capture(loss_of, model, x, y)
    assert torch.equal(program.run(program.values(model.state_dict()), x, y), loss_of(model, x, y))
