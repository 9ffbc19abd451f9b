"""Ordinary torch code as a program: what it runs is what one process does, bit by bit."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, batches, loss_of, train  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aiodaft.tensor.capturing import CaptureError, capture  # noqa: E402
from aiodaft.tensor.operations import Gradient, Mark, Operation  # noqa: E402
from aiodaft.tensor.program import Program  # noqa: E402
from aiodaft.tensor.randoms import manual_seed  # noqa: E402


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return GPT()


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = GPT()
    return capture(train, model, torch.optim.AdamW(model.parameters()), *next(batches(1)))


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def state_by_name(step: Any, models: list[Any]) -> dict[str, Any]:
    names = [f"{name}." for name in inspect.signature(step).parameters] if len(models) > 1 else [""]
    pairs = zip(names, models, strict=False)
    return {f"{name}{key}": tensor for name, model in pairs for key, tensor in model.state_dict().items()}


def assert_same_steps(
    step: Any, models: Any, optimizers: Any, data: Any, after: Any = lambda: None, tolerance: float = 0.0
) -> Any:
    """The program of a step and the step itself, in turns, give the same results, parameters and buffers."""
    models, optimizers, data = [one if isinstance(one, list) else [one] for one in (models, optimizers, list(data))]
    program = capture(step, *models, *optimizers, *data[0])
    values = program.values(state_by_name(step, models), seed=3)
    for at, one in enumerate(data):
        found = program.run(values, *one)
        with manual_seed(3, at):
            wanted = step(*models, *optimizers, *one)
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
        after()
    state = state_by_name(step, models)
    found = {name: values[program.aliases.get(name, name)] for name in state}
    torch.testing.assert_close(found, state, rtol=0, atol=tolerance)
    writing = [one for one in program.operations if isinstance(one, Operation) and is_write(one)]
    assert all(one.cause.phase == "update" for one in writing)
    return program


def is_write(one: Operation) -> bool:
    return str(one.target).split(".")[1].endswith("_") or bool(one.kwargs.get("out"))


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 3))


def rows(count: int = 3) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def fit(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_twenty_steps_of_adamw_are_bitwise_those_of_one_process(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    assert_same_steps(train, model, optimizer, batches(20), schedule.step)


def test_a_capture_leaves_model_and_optimizer_as_they_were(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
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
    with warnings.catch_warnings(action="error"):  # the program makes the steps of which a scheduler would warn
        schedule.step()


def test_a_model_without_data_has_the_same_program(model: Any) -> None:
    x, y = next(batches(1))
    with torch.device("meta"):
        empty = GPT()
    programs = [capture(train, one, torch.optim.AdamW(one.parameters()), x, y) for one in (model, empty)]
    assert programs[0].operations == programs[1].operations
    assert programs[0].inputs == programs[1].inputs


def test_each_operation_says_its_module_line_and_phase(program: Program) -> None:
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


def test_marks_stand_at_the_ends_of_modules_and_of_their_gradients(model: Any, program: Program) -> None:
    marks = Counter(
        (one.side, one.gradient) for one in program.operations if isinstance(one, Mark) and one.module == "blocks.1"
    )
    assert marks == {("in", False): 1, ("in", True): 1, ("out", False): 1, ("out", True): 1}
    outs = {one.out for one in program.operations if isinstance(one, Mark) and not one.gradient}
    assert all(one.forward in outs for one in program.operations if isinstance(one, Mark) and one.gradient)
    gradients = [one.parameter for one in program.operations if isinstance(one, Gradient)]
    assert gradients == [name for name, _ in model.named_parameters()]


def test_only_the_update_writes_and_costs_what_torch_does_for_one_tensor(model: Any, program: Program) -> None:
    operations = [one for one in program.operations if isinstance(one, Operation)]
    assert {one.cause.phase for one in operations if is_write(one)} == {"update"}
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


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, maximize=True, weight_decay=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "lr is a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.125), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "adadelta": torch.optim.Adadelta,
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:], "lr": 0.01}], 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_updates_as_in_one_process(name: str) -> None:
    model = small()
    assert_same_steps(fit, model, OPTIMIZERS[name](list(model.parameters())), rows())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Any) -> Any:
        return self.model(x) * self.scale + self.shift


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "nadam", "adagrad"])
def test_parameters_without_dimensions_have_states_of_their_own(name: str) -> None:
    model = Scaled()
    program = assert_same_steps(fit, model, OPTIMIZERS[name](list(model.parameters())), rows())
    states = {one.name for one in program.inputs if one.role == "state" and one.parameter == "scale"}
    assert states
    assert {one.partition("/")[2] for one in states} == {"scale"}


def test_an_optimizer_that_has_made_steps_goes_on_from_its_state() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(CaptureError, match="momentum_buffer of 0.weight depends on gradients: take one step before"):
        capture(fit, model, optimizer, *rows(1)[0])
    fit(model, optimizer, *rows(1)[0])
    assert_same_steps(fit, model, optimizer, rows())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    fit(model, optimizer, *rows(1)[0])
    assert_same_steps(fit, model, optimizer, rows())


def test_numbers_of_a_group_are_read_anew_and_may_not_change_the_branch_of_the_code() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    program = assert_same_steps(
        fit, model, optimizer, rows(), lambda: optimizer.param_groups[0].update(lr=0.01, momentum=0.5)
    )
    assert dict(program.scalars) == {
        "optimizer.0.lr": 0.01, "optimizer.0.momentum": 0.5, "optimizer.0.weight_decay": 0.0,
        "optimizer.0.dampening": 0.0,
    }  # fmt: skip
    optimizer.param_groups[0]["weight_decay"] = 0.1  # no input of the program, which has no decay
    with pytest.raises(ValueError, match=r"optimizer.0.weight_decay is 0.1 now.*capture it again"):
        program.scalars["optimizer.0.lr"]


def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    losses = []
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        losses.append(nn.functional.mse_loss(model(a), b) / 2)
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses


def clip(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def recompute(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.mse_loss(checkpoint(model, x, use_reentrant=False), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def autocast(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def draw(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    x = x + torch.randn_like(x) * torch.bernoulli(torch.rand(8, 6)) + torch.randint(0, 5, (8, 1))
    return fit(model, optimizer, (x + torch.empty(6).uniform_(-1, 1))[torch.randperm(8)], y)


@pytest.mark.parametrize("step", [accumulate, clip, recompute, autocast, draw], ids=lambda step: step.__name__)
def test_a_step_as_users_write_it_is_that_of_one_process(step: Any) -> None:
    model = small()
    program = assert_same_steps(step, model, torch.optim.AdamW(model.parameters(), 0.1), rows())
    gradients = [one.parameter for one in program.operations if isinstance(one, Gradient)]
    assert gradients == [name for name, _ in model.named_parameters()]


def test_a_recomputation_draws_with_the_number_of_its_forward() -> None:
    model = small()
    program = capture(recompute, model, torch.optim.AdamW(model.parameters()), *rows(1)[0])
    draws = [one for one in program.operations if isinstance(one, Operation) and "random" in str(one.target)]
    assert [one.cause.phase for one in draws] == ["forward", "backward"]
    assert draws[0].args == draws[1].args


def test_gradients_that_no_code_drops_are_states_of_the_program() -> None:
    def never(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    model = small()
    program = assert_same_steps(never, model, torch.optim.AdamW(model.parameters(), 0.1), rows())
    assert "grad/0.weight" in {one.name for one in program.outputs}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.embedding(x)) * self.scale


class Writes(nn.Module):
    """Writes to tensors, to views of them and to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("count", torch.zeros(3))
        self.plain = torch.randn(6)

    def forward(self, x: Any) -> Any:
        assert isinstance(self.count, torch.Tensor)
        h = x @ self.weight + self.plain
        h[:, 0] = 1.0
        h[:, 1:3].mul_(2.0)
        z = torch.zeros(8, 6)
        z[2:4] = h[2:4]
        z.t()[3].add_(h[:, 3])
        z.narrow(1, 2, 2).add_(z[:, :2])
        z.view(4, 2, 6)[1, :, 2].copy_(h[:2, 4])
        z[torch.tensor([0, 2])] = h[torch.tensor([0, 2])]
        z.transpose_(0, 1).diagonal().fill_(0.5)
        z.t_()
        z.masked_fill_(h > 0, 0.1)
        z += h
        self.count += 1
        self.count.select(0, 0).copy_(z.detach().mean())
        torch.mul(self.count, 2, out=self.count)
        return z[:, :3] * self.count


def lstm() -> Any:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(3, 4), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.out(self.lstm(x.view(8, 2, 3).transpose(0, 1))[0][-1])

    return Last()


def attention() -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(6, 2, dropout=0.1), nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            return self.out(self.attention(x, x, x, need_weights=False)[0])

    return Attention()


MODULES: dict[str, Any] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)
    ),
    "writes": Writes,
    "lstm": lstm,
    "attention": attention,
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_in_one_process(name: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name]()
    # An LSTM outside of a program is one kernel of oneDNN.
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert_same_steps(fit, model, optimizer, rows(), tolerance=1e-6 if name == "lstm" else 0)


def test_tied_weights_are_one_input_and_a_buffer_of_no_checkpoint_has_its_value() -> None:
    torch.manual_seed(0)
    model, data = Tied(), [(torch.tensor([[1, 4], [2, 2]]), torch.randn(2, 2, 5))] * 2
    program = assert_same_steps(fit, model, torch.optim.AdamW(model.parameters(), 0.1), data)
    assert program.aliases == {"head.weight": "embedding.weight"}
    assert [one.name for one in program.inputs if one.role == "parameter"] == ["embedding.weight"]
    assert [one.value for one in program.inputs if one.role == "buffer"] == [torch.tensor(2.0)]


def test_a_module_with_two_names_is_one_input() -> None:
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 3))
    program = assert_same_steps(fit, model, torch.optim.AdamW(model.parameters(), 0.1), rows())
    assert program.aliases == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_an_optimizer_that_counts_in_python_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
            return super().step(closure)

    model = small()
    with pytest.raises(CaptureError, match="counts its steps in a tensor"):
        capture(fit, model, Counting(model.parameters(), 0.1), *rows(1)[0])


def test_two_models_with_an_optimizer_each_train_in_one_step() -> None:
    def adversaries(g: Any, d: Any, of_g: Any, of_d: Any, x: Any, y: Any) -> Any:
        made = g(x)
        told = (d(made.detach()) - d(y)).mean()
        told.backward()
        of_d.step()
        of_d.zero_grad()
        fooled = -d(made).mean()
        fooled.backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        return told, fooled

    models = [small(), nn.Linear(3, 1)]
    optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in models]
    program = assert_same_steps(adversaries, models, optimizers, rows())
    assert {one.name for one in program.inputs if one.role == "parameter"} >= {"g.0.weight", "d.bias"}


def test_parameters_in_bfloat16_with_a_master_copy() -> None:
    def step(model: Any, master: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = nn.functional.mse_loss(model(x.bfloat16()).float(), y)
        loss.backward()
        for one, copy in zip(model.parameters(), master, strict=True):
            copy.grad, one.grad = one.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        for one, copy in zip(model.parameters(), master, strict=True):
            one.data = copy.data.bfloat16()
        return loss

    model = small().bfloat16()
    master = nn.ParameterList(one.detach().float() for one in model.parameters())
    assert_same_steps(step, [model, master], torch.optim.AdamW(master, 0.1), rows())


def test_results_and_states_never_share_memory() -> None:
    def step(model: Any, average: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = fit(model, optimizer, x, y)
        with torch.no_grad():
            for one, other in zip(model.parameters(), average.parameters(), strict=True):
                other.copy_(one)
        return model[0].weight, loss

    model, average = small(), small()
    program = capture(step, model, average, torch.optim.SGD(model.parameters(), 0.1), *rows(1)[0])
    state = {f"model.{name}": one for name, one in model.state_dict().items()}
    state |= {f"average.{name}": one for name, one in average.state_dict().items()}
    values = program.values(state)
    weight, _ = program.run(values, *rows(1)[0])
    assert torch.equal(weight, values["model.0.weight"])
    assert torch.equal(weight, values["average.0.weight"])
    assert len({one.data_ptr() for one in (weight, values["model.0.weight"], values["average.0.weight"])}) == 3


VALUES: dict[str, Any] = {
    "a branch": lambda model, x: model(x) if x.sum() > 0 else x,
    "item": lambda model, x: model(x).sum().item(),
    "tolist": lambda model, x: model(x).tolist(),
    "numpy": lambda model, x: model(x).detach().numpy(),
    "a format": lambda model, x: f"{model(x).sum():.2f}",
    "nonzero": lambda model, x: model(x).nonzero(),
    "a mask": lambda model, x: x[x > 0],
    "an index": lambda model, x: [1, 2, 3][model(x).argmax()],
}


@pytest.mark.parametrize("name", VALUES)
def test_code_that_needs_a_value_fails_with_its_line_and_a_way_out(name: str) -> None:
    line = VALUES[name].__code__.co_firstlineno
    with pytest.raises(CaptureError, match=rf"test_capture.py:{line}: the code needs the value.*write torch.where"):
        capture(VALUES[name], small(), rows(1)[0][0])


def schedule(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.param_groups[0]["lr"] = 0.5
    return fit(model, optimizer, x, y)


def test_code_that_no_program_can_be_fails_with_a_way_out() -> None:
    model, (x, y) = small(), rows(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    refused: list[tuple[str, Any]] = [
        ("pass the model", (lambda x: nn.functional.linear(x, model[0].weight), x)),
        ("parameters of no model", (fit, nn.Linear(6, 3), optimizer, x, y)),
        ("writes to its argument x: clone it", (lambda x: x.add_(1), x)),
        ("changes the shape of a tensor in place", (lambda x: x.clone().resize_(2), x)),
        ("changes numbers of optimizer in Python.*step schedulers outside", (schedule, model, optimizer, x, y)),
        ("s is a scheduler", (lambda s: s, torch.optim.lr_scheduler.StepLR(optimizer, 1))),
        ("the optimizer branches on a number", (fit, model, torch.optim.RAdam(model.parameters()), x, y)),
        ("LBFGS calls the model", (fit, model, torch.optim.LBFGS(model.parameters()), x, y)),
        ("the result has a Linear", (lambda model, x: model[0], model, x)),
        ("no counter-based form", (lambda x: x.clone().cauchy_(), x)),
        ("w is 0.weight of a model", (lambda model, w: w, model, model[0].weight)),
    ]
    before = {name: dict(vars(one)) for name, one in [("model", model), ("optimizer", optimizer)]}
    for message, (fn, *args) in refused:
        with pytest.raises(CaptureError, match=message):
            capture(fn, *args)
    assert {name: dict(vars(one)) for name, one in [("model", model), ("optimizer", optimizer)]} == before


def test_a_micro_batch_has_a_program_of_its_own(model: Any) -> None:
    x, y = next(batches(1))
    program = capture(loss_of, model, x, y)
    micro = program.micro(2)
    values = micro.values(model.state_dict())
    assert torch.equal(micro.run(values, x[2:], y[2:]), loss_of(model, x[2:], y[2:]))
    assert program.micro(1) is program
    with pytest.raises(ValueError, match=r"x of shape \(4, 8\) cannot be cut into 3"):
        program.micro(3)


def test_a_description_counts_inputs_and_operations(model: Any, program: Program) -> None:
    text = program.describe()
    count = sum(one.numel() * 4 for one in model.parameters())
    assert f"37 parameters, {count:,} bytes" in text
    assert "operations in update: 74 aten.mul_.Tensor" in text


@pytest.mark.parametrize("name", [pytest.param("Llama", marks=pytest.mark.programs), "GPT2"])
def test_a_model_of_transformers_trains_as_in_one_process(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "Llama":
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=8, **sizes)
    else:
        config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = getattr(transformers, f"{name}{'ForCausalLM' if name == 'Llama' else 'LMHeadModel'}")(config)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = model(input_ids=x, labels=y, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # Marks change the order in which autograd adds the gradients of a tensor with three uses.
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert_same_steps(step, model.train(), optimizer, batches(2, rows=2), tolerance=1e-7)
