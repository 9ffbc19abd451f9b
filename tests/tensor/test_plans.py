"""One program under many strategies: losses and parameters of one process, and the collectives of each strategy."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from lockstep import run_whole
from tiny_gpt import GPT, batches, train
from torch.distributed.tensor import Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

from aiodaft.pipeline import zb_h1
from aiodaft.resharding import Layout, Sharding
from aiodaft.tensor.capturing import capture
from aiodaft.tensor.planner import Planner
from aiodaft.tensor.program import ImplicitCollectives, Program
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import bounds
from aiodaft.tensor.strategy import Patterns, Strategy

TP = {
    "blocks.*.attn.[qkv].*": {"tp": Shard(0)},
    "blocks.*.attn.out.weight": {"tp": Shard(1)},
    "blocks.*.up.*": {"tp": Shard(0)},
    "blocks.*.down.weight": {"tp": Shard(1)},
}
BATCH = {"*": {"dp": Shard(0)}}
STRATEGIES: dict[str, tuple[Strategy, dict[str, int]]] = {
    "dp": (Strategy(inputs=BATCH), {"dp": 2}),
    "dp, a batch that three ranks do not divide": (Strategy(inputs=BATCH), {"dp": 3}),
    "zero1": (Strategy(inputs=BATCH, optimizer={"*": {"dp": Shard(0)}}), {"dp": 2}),
    "zero3": (
        Strategy(inputs=BATCH, params={"*": {"dp": Shard(0)}}, use={"*": {}}),
        {"dp": 2},
    ),
    "zero3, uneven": (
        Strategy(inputs=BATCH, params={"*": {"dp": Shard(0)}}, use={"*": {}}),
        {"dp": 3},
    ),
    "tp": (Strategy(params=TP), {"tp": 2}),
    "dp x tp": (Strategy(params=TP, inputs=BATCH), {"dp": 2, "tp": 2}),
    "the vocabulary in parts": (
        Strategy(params={**TP, "tok.weight": {"tp": Shard(0)}, "head.weight": {"tp": Shard(0)}}),
        {"tp": 2},
    ),
}


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


@pytest.fixture(scope="module")
def program(model: GPT) -> Program:
    x, y = next(batches(1))
    return capture(train, model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y)


@pytest.fixture(scope="module")
def alone(model: GPT) -> tuple[list[float], dict[str, Any]]:
    here = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(here.parameters(), lr=1e-2)
    losses = [train(here, optimizer, x, y).item() for x, y in batches(3)]
    return losses, here.state_dict()


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_strategy_gives_the_losses_of_one_process(
    name: str, model: GPT, program: Program, alone: tuple[list[float], dict[str, Any]]
) -> None:
    strategy, axes = STRATEGIES[name]
    plan = Planner(program, strategy, Rules(axes)).made()
    values = {**program.values(model.state_dict()), **program.scalars}
    losses = []
    for x, y in batches(3):
        made = run_whole(plan, {**values, **program.arguments.bind(x, y)})
        results = [made.pop(one.name) for one in plan.outputs if one.role == "result"]
        losses.append(results[0].item())
        values |= made
        values["random.step"] += 1
    assert losses == pytest.approx(alone[0], abs=1e-5)
    for parameter, value in alone[1].items():
        if parameter.endswith(".k.bias"):
            continue  # Softmax does not depend on it: AdamW makes steps of the noise of its gradient.
        torch.testing.assert_close(values[parameter], value, atol=1e-4, rtol=0)


def test_tensor_parallel_layers_need_two_all_reduces_forward_and_two_backward(program: Program) -> None:
    plan = Planner(program, Strategy(params=TP), Rules({"tp": 2})).made()
    counts = Counter((one.kind, one.cause.phase) for one in plan.collectives)
    assert counts == {("all_reduce", "forward"): 4, ("all_reduce", "backward"): 4}


@pytest.mark.parametrize("name", ["zero3", "tp"])
def test_what_is_recomputed_is_not_kept_and_gives_the_same_bits(program: Program, model: GPT, name: str) -> None:
    strategy, axes = STRATEGIES[name]
    values = {**program.values(model.state_dict()), **program.scalars, **program.arguments.bind(*next(batches(1)))}
    plans = [
        Planner(program, replace(strategy, recompute=recompute), Rules(axes)).made()
        for recompute in ((), ("blocks.*",))
    ]
    kept, again = (run_whole(plan, dict(values)) for plan in plans)
    assert [name for name, value in kept.items() if not torch.equal(again[name], value)] == []
    assert plans[1].peak[0] < plans[0].peak[0]
    assert plans[1].flops[0] > plans[0].flops[0]


def test_sharded_parameters_are_gathered_a_layer_at_a_time(program: Program, model: GPT) -> None:
    strategy, axes = STRATEGIES["zero3"]
    made = Planner(program, strategy, Rules(axes)).made()
    gathers = [one for one in made.collectives if one.kind == "all_gather" and one.cause.phase != "update"]
    assert {one.cause.phase for one in gathers} == {"forward", "backward"}
    data = Planner(program, STRATEGIES["dp"][0], Rules(axes)).made()
    # At most 1.5 times the bytes of data parallelism: gathered twice, scattered once.
    assert data.bytes["dp"][0] < made.bytes["dp"][0] <= 1.5 * data.bytes["dp"][0]


def test_a_convolution_with_a_norm_of_batches_trains_in_parts_and_has_the_flops_of_torch() -> None:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ConvTranspose2d(4, 2, 3))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 3, 6, 6)
    program = capture(step, model, optimizer, x)
    whole = program.plan(Strategy(), {"dp": 1})
    strategy = Strategy(inputs=BATCH, params={"*": {"dp": Shard(0)}}, use={"*": {}})
    values = {**program.values(model.state_dict()), **program.scalars, "x": x}
    made = run_whole(program.plan(strategy, {"dp": 2}), values)
    with FlopCounterMode(display=False) as counter:
        step(model, optimizer, x)
    assert whole.flops == (counter.get_total_flops(),)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(made[name], value, atol=1e-5, rtol=1e-4)


def test_a_plan_describes_and_draws_itself(program: Program) -> None:
    strategy, axes = STRATEGIES["dp x tp"]
    made = program.plan(strategy, axes)
    said = made.describe()
    assert said.startswith("4 ranks (dp=2, tp=2): 12 collectives, ")
    assert "1 x all_reduce on tp: out of blocks.0.down (blocks.0.down, tiny_gpt.py:" in said
    picture = made.draw()
    assert "weight tp=S(0)" in picture
    assert "1 x all_reduce tp" in picture


def test_a_collective_that_the_strategy_does_not_ask_for_is_an_error_on_demand(program: Program) -> None:
    strategy, axes = STRATEGIES["tp"]
    with pytest.raises(ImplicitCollectives) as caught:
        program.plan(replace(strategy, implicit="error"), axes)
    message = str(caught.value)
    assert message.startswith("8 collectives that the strategy does not ask for:")
    assert "all_reduce on tp: out of blocks.0.attn.out (blocks.0.attn.out, tiny_gpt.py:" in message
    asked: Patterns = {"blocks.?": {}, "blocks.?.attn": {}, "*.out": {}, "*.down": {}, "*.ln?": {}}
    program.plan(replace(strategy, implicit="error", outputs=asked), axes)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(params={"block.0.*": {"tp": Shard(0)}}), "params: no name fits 'block.0"),
        (Strategy(params={"ln.weight": {"tp": Shard(1)}}), "ln.weight has the shape .* no dimension 1"),
        (Strategy(params={"ln.weight": {"ep": Shard(0)}}), "there is no axis ep: the axes are tp"),
        (Strategy(inputs={"z": {"tp": Shard(0)}}), "inputs: no name fits 'z'; the nearest are x, y"),
    ],
)
def test_a_strategy_that_does_not_fit_names_the_nearest(program: Program, strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program.plan(strategy, {"tp": 2})


def test_a_strategy_is_json_there_and_back() -> None:
    own = Strategy(stages=("blocks.0",), microbatches=2, schedule=zb_h1(2, 2))
    for strategy in (*(one for one, _ in STRATEGIES.values()), own):
        assert Strategy.from_json(strategy.to_json()) == strategy
    for wrong, message in [
        ("[]", "is an object"),
        ('{"parms": {}}', "has no parms"),
        ('{"params": {"*": {"tp": "S"}}}', "is no placement"),
        ('{"schedule": ["F0.0 B0"]}', "'B0' is no task: write F0.2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Strategy.from_json(wrong)


def test_tensors_of_shape_0_are_joined_with_any_others() -> None:
    def join(x: Any) -> Any:
        return torch.cat([torch.tensor([]), x, x], -2)

    x = torch.arange(24.0).view(2, 3, 4)
    program = capture(join, x)
    plan = program.plan(Strategy(inputs={"x": {"tp": Shard(0)}}), {"tp": 2})
    values = {**program.values({}), **program.arguments.bind(x)}
    assert torch.equal(next(iter(run_whole(plan, values).values())), join(x))
    assert [one.kind for one in plan.collectives] == ["all_gather"]


@pytest.mark.programs
def test_llama_of_transformers_has_two_all_reduces_a_layer_in_each_direction() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, num_hidden_layers=2, **sizes))

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    tokens = torch.randint(96, (4, 16))
    program = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), tokens)
    columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
    names = {"*.[qkv]_proj.*": columns, "*.gate_proj.*": columns, "*.up_proj.*": columns}
    parallel = program.plan(Strategy(params={**names, "*.o_proj.*": rows, "*.down_proj.*": rows}), {"tp": 2})
    sharded = program.plan(STRATEGIES["zero3"][0], {"dp": 2})
    values = {**program.values(model.state_dict()), **program.scalars, **program.arguments.bind(tokens)}
    expected = step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens)
    for plan in (parallel, sharded):
        made = run_whole(plan, dict(values))
        result = next(one.name for one in plan.outputs if one.role == "result")
        torch.testing.assert_close(made[result], expected.detach(), atol=1e-6, rtol=0)
        weight = "model.layers.0.mlp.up_proj.weight"
        torch.testing.assert_close(made[weight], model.state_dict()[weight], atol=1e-5, rtol=0)
    assert Counter((one.kind, one.cause.phase) for one in parallel.collectives) == {
        ("all_reduce", "forward"): 4,
        ("all_reduce", "backward"): 4,
    }


@pytest.mark.parametrize("length", [0, 1, 7, 10])
def test_layouts_of_moves_cut_as_placements_do(length: int) -> None:
    axes, placements = {"a": 2, "b": 3, "c": 2}, (Shard(0), Replicate(), Shard(0))
    layout = Layout(axes, {"x": Sharding(shape=(length, 2), dtype=torch.float32, dims={0: ("a", "c")})})
    for rank in range(layout.size):
        start, count = bounds((length, 2), placements, axes, rank)[0]
        part = layout.part("x", rank)
        assert part is not None
        assert (part[0].stop - part[0].start, count and part[0].start) == (count, count and start)
