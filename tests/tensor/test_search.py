"""The search for a strategy: as good as all strategies tried, by the numbers of plans."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

from aiodaft.tensor import searching  # noqa: E402
from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.hardware import Hardware, Link  # noqa: E402
from aiodaft.tensor.plan import Plan  # noqa: E402
from aiodaft.tensor.program import Program  # noqa: E402
from aiodaft.tensor.searching import Candidate, search  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402


def hardware(bandwidth: float, latency: float = 1e-6, **more: Any) -> Hardware:
    link = Link(devices=8, bandwidth=bandwidth, latency=latency)
    return Hardware(**{
        "compute": {"float32": 1e12},
        "memory": 1e9,
        "bandwidth": 1e11,
        "overhead": 1e-6,
        "links": (link,),
        **more,
    })


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(model: nn.Module, rows: int, width: int) -> Program:
    x = torch.empty(rows, width)
    return capture(train, model, torch.optim.AdamW(model.parameters(), lr=0.1), x, x)


WAYS = {
    None: {},
    "rows": {"params": Shard(0)},
    "columns": {"params": Shard(1)},
    "zero1": {"optimizer": Shard(0)},
    "zero3": {"params": Shard(0), "use": None},
}


def strategies(names: Sequence[str], ways: Sequence[str | None]) -> Iterator[Strategy]:
    for chosen in product(ways, repeat=len(names)):
        fields: dict[str, Any] = {"params": {}, "optimizer": {}, "use": {}}
        for name, way in zip(names, chosen, strict=True):
            for kind, placement in WAYS[way].items():
                fields[kind][name] = {"d": placement} if placement else {}
        for dims in product((None, 0), (None, 0, 1)):
            inputs = {name: {"d": Shard(dim)} for name, dim in zip("xy", dims, strict=True) if dim is not None}
            yield Strategy(inputs=inputs, **fields)


@pytest.fixture(scope="module")
def forward() -> Program:
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False))
    return capture(loss_of, model, torch.empty(64, 256), torch.empty(64, 256))


@pytest.fixture(scope="module")
def forward_plans(forward: Program) -> list[Plan]:
    every = strategies(["0.weight", "2.weight"], [None, "rows", "columns"])
    return [forward.plan(one, {"d": 2}) for one in every]


@pytest.fixture(scope="module")
def layer() -> Program:
    return trained(nn.Linear(512, 512, bias=False), 64, 512)


@pytest.mark.parametrize(
    ("links", "words"),
    [((1e12, 1e-7), "d=2: tensor"), ((1e8, 1e-6), "d=2: data"), ((1e9, 1e-4), "d=2: replicas")],
    ids=["fast", "slow", "late"],
)
def test_a_search_finds_the_best_of_all_strategies_and_links_decide(
    forward: Program, forward_plans: list[Plan], links: tuple[float, float], words: str
) -> None:
    here = hardware(*links)
    every = [
        forward.plan(one, {"d": 2}).simulate(here).seconds
        for one in strategies(["0.weight", "2.weight"], [None, "rows", "columns"])
    ]
    found = search(forward, {"d": 2}, here)
    assert found.complete
    assert found.best.seconds == pytest.approx(min(every), rel=1e-9)
    assert found.best.words == words


@pytest.mark.parametrize("memory", [1e9, 4.3e6], ids=["ample", "scarce"])
def test_a_search_for_a_step_of_training_finds_the_best_that_holds(layer: Program, memory: float) -> None:
    here = hardware(1e10)
    plans = [layer.plan(one, {"d": 2}) for one in strategies(["weight"], list(WAYS))]
    best = min(one.simulate(here).seconds for one in plans if max(one.peak) <= memory)
    found = search(layer, {"d": 2}, here, memory=memory)
    assert found.best.seconds == pytest.approx(best, rel=1e-9)
    assert max(one.peak for one in (found.best, *found.others)) <= memory


def test_every_number_of_a_search_is_that_of_the_plan(layer: Program) -> None:
    here = hardware(1e10)
    found = search(layer, {"d": 2}, here)
    assert len(found.others) >= 5
    assert [one.seconds for one in found.others] == sorted(one.seconds for one in found.others)
    for one in (found.best, *found.others):
        again = layer.plan(Strategy.from_json(one.strategy.to_json()), one.axes)
        assert (one.seconds, one.peak) == (again.simulate(here).seconds, max(again.peak))
        assert one.words in found.describe()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def layers(count: int, rows: int = 64, width: int = 64) -> Program:
    return trained(nn.Sequential(*(Residual(width) for _ in range(count))), rows, width)


@pytest.fixture(scope="module")
def deep() -> Program:
    return layers(6)


def test_equal_layers_cost_the_search_what_two_do(deep: Program) -> None:
    here = hardware(1e12, 1e-7)
    few, many = (searching.Runs(one) for one in (layers(3), deep))
    assert len(few.runs) == len(many.runs)
    times = [sum(run.times for run in runs.runs if run.is_layer) for runs in (few, many)]
    assert times[1] == 6 * times[0] / 3
    found = search(deep, {"d": 2}, here, seconds=0)
    assert "tensor" in found.best.words
    assert all("*" in name for name in found.best.strategy.params)


@pytest.mark.programs
def test_of_several_devices_a_pipeline_is_tried_and_a_weak_one_gets_fewer_layers(deep: Program) -> None:
    slow = hardware(2e8, 1e-4, uneven={1: {"compute": 0.5, "bandwidth": 0.5}}, overhead=1e-8)
    found = search(deep, {"pp": 2}, slow)
    assert found.best.strategy.stages == ("3",)
    assert {one.strategy.schedule for one in (found.best, *found.others)} >= {"one_f_one_b", "zb_h1"}
    even = search(deep, {"pp": 2}, hardware(2e8, 1e-4, overhead=1e-8), seconds=0)
    assert even.best.strategy.stages == ("2",)
    with pytest.raises(ValueError, match="6 equal modules in a list, which cannot be cut into 7 stages"):
        search(deep, {"pp": 7}, slow)


def test_a_slow_outer_link_gets_the_axis_that_sends_less(deep: Program) -> None:
    links = (Link(devices=2, bandwidth=1e12, latency=1e-8), Link(devices=4, bandwidth=1e7, latency=1e-8))
    best = search(deep, {"a": 2, "b": 2}, hardware(1.0, links=links, overhead=1e-8), seconds=0).best
    received = best.plan.bytes
    assert max(received["a"]) < max(received["b"])


def test_memory_that_cannot_be_met_is_refused_with_what_would(layer: Program) -> None:
    with pytest.raises(
        ValueError,
        match=r"holds in 1\.5 MB: the least .* too much .*unequal lengths were not tried\. On \d+ devices \(d=\d+\) it",
    ):
        search(layer, {"d": 2}, hardware(1e10), memory=1.5e6)


@pytest.mark.parametrize(
    ("axes", "memory", "words"),
    [
        ({}, 1e9, "axes are {}: give names and sizes"),
        ({"d": 0}, 1e9, "axes are {'d': 0}: give names and sizes"),
        (0, 1e9, "0 devices: give at least one, or axes such as"),
        (2.5, 1e9, "2.5 devices: give at least one, or axes such as"),
        ({"d": 2}, 0, "memory is 0: give a positive number of bytes"),
        ({"d": 2}, math.nan, "memory is nan: give a positive number of bytes"),
    ],
)
def test_wrong_devices_and_memory_are_refused(layer: Program, axes: Any, memory: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search(layer, axes, hardware(1e10), memory=memory)


@pytest.mark.programs
def test_less_memory_is_got_by_recomputation() -> None:
    program = layers(3, rows=1024, width=16)
    ample = search(program, {"d": 2}, hardware(1e10), seconds=0).best
    least = search(program, {"d": 2}, hardware(1e10), memory=0.8 * ample.peak).best
    assert "recomputation" in least.words
    assert least.seconds > ample.seconds


def test_experts_of_one_tensor_are_parallel() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(4, 64, 255))
            self.down = nn.Parameter(torch.empty(4, 255, 64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(torch.relu(torch.bmm(x.expand(4, -1, -1), self.up)), self.down).mean(0)

    x = torch.empty(64, 64)
    program = capture(loss_of, Experts(), x, x)
    assert "expert" in search(program, {"ep": 4}, hardware(1e12, 1e-8), seconds=0).best.words


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_search_gives_the_best_so_far(
    layer: Program, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    plans = []

    def interrupted(*args: Any) -> Any:
        plans.append(plan(*args))
        if len(plans) > 2:
            raise error
        return plans[-1]

    plan = searching.plan
    monkeypatch.setattr(searching, "plan", interrupted)
    found = search(layer, {"d": 2}, hardware(1e10))
    assert (len(found.others), found.complete) == (1, False)
    assert "interrupted" in found.describe()


def test_a_search_without_time_gives_the_first_that_it_finds(layer: Program) -> None:
    found = search(layer, {"d": 2}, hardware(1e10), seconds=0)
    assert not found.complete
    assert isinstance(found.best, Candidate)


def test_without_a_solver_the_error_names_the_extra(layer: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install 'aiodaft\[plan\]'"):
        search(layer, {"d": 2}, hardware(1e10))


@pytest.mark.programs
def test_a_number_of_devices_is_cut_into_axes(layer: Program) -> None:
    found = search(layer, 4, hardware(1e12))
    tried: list[Mapping[str, int]] = [one.axes for one in (found.best, *found.others)]
    assert {math.prod(axes.values()) for axes in tried} == {4}
    assert {"dp": 4} in tried
    assert {"dp": 2, "tp": 2} in tried
