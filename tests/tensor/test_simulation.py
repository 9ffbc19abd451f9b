"""Simulated steps: on hardware of round numbers, the times are those of arithmetic done by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.hardware import Hardware, Link  # noqa: E402
from aiodaft.tensor.instructions import Instruction, Slot  # noqa: E402
from aiodaft.tensor.operations import Cause  # noqa: E402
from aiodaft.tensor.segments import Collective  # noqa: E402
from aiodaft.tensor.specs import Meta, Spec  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402

ROWS = {"*": {"dp": Shard(0)}}
MEGATRON = Strategy(params={"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}})
# A product of 64,000 operations takes a second, a collective of 2 a second and 1,600 bytes each second more.
HARDWARE = Hardware(
    compute={"float32": 64e3},
    memory=1e6,
    bandwidth=float("inf"),
    overhead=0.0,
    links=(Link(devices=8, bandwidth=1600.0, latency=1.0),),
)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 80, bias=False), nn.Linear(80, 40, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def train(model: nn.Module, optimizer: Any, x: Any) -> Any:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture(scope="module")
def program() -> Any:
    model = MLP()
    return capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(20, 40))


def test_tensor_parallelism_takes_its_products_and_its_collective(program: Any) -> None:
    done = program.plan(MEGATRON, {"tp": 2}).simulate(HARDWARE)
    # 5 products; the all_reduce of (20, 40) floats, of which a rank receives 3,200 bytes.
    assert done.seconds == 5 + (1 + 2)
    assert (done.busy, done.waits, done.same) == ((5, 5), {"tp": (3, 3)}, (0, 0))
    ((one, seconds),) = done.collectives
    assert (one.kind, seconds) == ("all_reduce", 3)
    assert done.describe().splitlines() == [
        "8.00 s a step; a rank computes for 5.00 s (62%), waits at most: tp 38%; memory 32.0 kB",
        "  1 x all_reduce on tp: 3.00 s, 3.2 kB",
    ]


def test_operations_take_their_bytes_their_own_rate_and_the_overhead(program: Any) -> None:
    plan = program.plan(MEGATRON, {"tp": 2})
    base = plan.simulate(replace(HARDWARE, bandwidth=3200.0)).seconds
    # relu reads and writes (20, 40); its gradient reads two of them; sum reads the whole; ones_like 4 and 4 bytes; two
    # parts of parameters (40, 40) and their gradients are read, and the parts written. Products are slower than bytes.
    nbytes = 6400 + 9600 + 3204 + 8 + 2 * 3 * 6400
    products = 5 * 12800 / 3200
    assert base == pytest.approx(nbytes / 3200 + products + 3)
    faster = plan.simulate(replace(HARDWARE, bandwidth=3200.0, rates={"aten.relu": 6400.0})).seconds
    assert base - faster == pytest.approx(1)
    # 5 products, relu, its gradient, sum, ones_like and two updates.
    assert plan.simulate(replace(HARDWARE, overhead=1.0)).seconds == 8 + 11


def test_ranks_share_processors_and_copy_with_them(program: Any) -> None:
    plan = program.plan(MEGATRON, {"tp": 2})
    assert plan.simulate(replace(HARDWARE, processors=2)).seconds == 8
    assert plan.simulate(replace(HARDWARE, processors=1)).seconds == 16


def test_a_weak_device_or_a_slow_link_holds_up_the_others(program: Any) -> None:
    plan = program.plan(MEGATRON, {"tp": 2})
    weak = plan.simulate(replace(HARDWARE, uneven={1: {"compute": 0.5}}))
    # Two products on both sides of the first wait, then three.
    assert (weak.seconds, weak.busy, weak.waits) == (10 + 3, (5, 10), {"tp": (5, 3)})
    assert plan.simulate(replace(HARDWARE, uneven={0: {"links": 0.5}})).seconds == 5 + (1 + 4)


@pytest.mark.parametrize(
    ("schedule", "seconds", "bubbles"),
    [
        # 0: F F . . W . . W; 1: . F B W F B W: half a second lies between an F and the next, and a B and the W of 0.
        ("one_f_one_b", 8.0, (4.0, 2.0)),
        # 0: F F . . W . W; 1: . F B F B W W, where the W of stage 1 hides nothing more than a second.
        ("zb_h1", 7.5, (3.5, 1.5)),
    ],
)
def test_a_pipeline_has_the_bubbles_of_its_schedule(
    program: Any, schedule: str, seconds: float, bubbles: tuple[float, ...]
) -> None:
    link = Link(devices=2, bandwidth=float("inf"), latency=0.5)
    plan = program.plan(Strategy(stages=("up",), microbatches=2, schedule=schedule), {"pp": 2})
    done = plan.simulate(replace(HARDWARE, links=(link,)))
    assert (done.seconds, done.bubbles, done.busy) == (seconds, bubbles, (4, 6))


def test_a_collective_goes_on_while_its_ranks_compute(program: Any) -> None:
    spec, meta = (Replicate(),), Meta((20, 40), (40, 1), torch.float32)
    weights = Meta((40, 40), (40, 1), torch.float32)
    steps = [
        Instruction("op", "aten.mm.default", (Slot(0), Slot(1)), {}, (2,)),
        Instruction("all_reduce", "tp", (Slot(2), "sum"), {}, (3,)),
        Instruction("op", "aten.mm.default", (Slot(0), Slot(1)), {}, (4,)),
        Instruction("all_reduce", "tp", (Slot(4), "sum"), {}, (5,)),
        Instruction("op", "aten.mm.default", (Slot(3), Slot(1)), {}, (6,)),
        Instruction("op", "aten.add.Tensor", (Slot(5), Slot(6)), {}, (7,)),
    ]
    plan = replace(
        program.plan(MEGATRON, {"tp": 2}),
        instructions=tuple(steps),
        causes=(Cause("", "mlp"),) * len(steps),
        specs={number: Spec(spec, weights if number == 1 else meta) for number in range(8)},
        collectives=tuple(Collective("all_reduce", "tp", (3200, 3200), Cause(""), True, slot) for slot in (3, 5)),
    )
    done = plan.simulate(HARDWARE)
    # The first begins at 1 and ends at 4, the second waits for it and ends at 7; the third product begins at 4.
    assert done.seconds == 7
    assert [one[1:4] for one in done.spans if one.kind == "collective"] == [
        (1, 4, "all_reduce tp: mlp"),
        (4, 7, "all_reduce tp: mlp"),
    ]
    assert done.waits == {"tp": (2 + 2, 2 + 2)}


def test_ranks_that_do_the_same_are_simulated_once(program: Any) -> None:
    hardware = replace(HARDWARE, links=(Link(devices=4096, bandwidth=1600.0, latency=1.0),))
    done = program.plan(replace(MEGATRON, inputs=ROWS), {"dp": 5, "tp": 2}).simulate(hardware)
    assert set(done.same) == {0} and len(done.busy) == 10  # noqa: PT018
    # 20 rows on 8 are 3 for 6 ranks, 2 for one and none for the last.
    uneven = program.plan(Strategy(inputs=ROWS), {"dp": 8}).simulate(hardware)
    assert uneven.same == (0, 0, 0, 0, 0, 0, 6, 7)
    assert uneven.busy[6] < uneven.busy[0]


def test_planning_for_10000_devices_takes_as_many_instructions_as_for_16() -> None:
    with torch.device("meta"):
        model, x = MLP(), torch.zeros(10_000, 40)
    program = capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    hardware = replace(HARDWARE, links=(*HARDWARE.links, Link(devices=10_000, bandwidth=100.0, latency=2.0)))
    small, large = (program.plan(replace(MEGATRON, inputs=ROWS), {"dp": size, "tp": 2}) for size in (8, 5000))
    assert len(small.instructions) == len(large.instructions)
    done = large.simulate(hardware)
    assert (set(done.same), len(done.spans)) == ({0}, len(small.simulate(hardware).spans))
    # The gradients of 5,000 ranks in 13 rounds: 4 of them share a node.
    (gradients,) = [seconds for one, seconds in done.collectives if one.cause.operation == "gradient"]
    assert gradients == pytest.approx(13 * 2 + 2 * 25600 / 2 * 4999 / 5000 / 4 / 100, rel=1e-3)


def test_a_step_without_work_takes_no_time() -> None:
    program = capture(lambda x: x.t(), torch.zeros(2, 3))
    done = program.plan(Strategy(), {"dp": 2}).simulate(HARDWARE)
    assert done.seconds == 0
    assert done.describe().startswith("0.0 us a step; a rank computes for 0.0 us (0%), waits at most: dp 0%")
    assert "0.0 us a step" in done.draw()


def test_a_plan_for_more_ranks_than_devices_is_refused(program: Any) -> None:
    with pytest.raises(ValueError, match="the plan is for 16 ranks, and the hardware has 8 devices"):
        program.plan(MEGATRON, {"dp": 8, "tp": 2}).simulate(HARDWARE)


def test_the_time_line_is_a_trace_and_a_picture(program: Any, tmp_path: Path) -> None:
    done = program.plan(MEGATRON, {"tp": 2}).simulate(HARDWARE)
    done.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["ranks 0 to 1"]
    (wait,) = [one for one in events if one.get("cat") == "wait"]
    assert (wait["ph"], wait["ts"], wait["dur"]) == ("X", 2e6, 3e6)
    assert sum(one["dur"] for one in events if one["ph"] == "X" and one["tid"] == 1) == 8e6
    picture = done.draw()
    assert "ranks 0 to 1" in picture and "8.00 s a step" in picture  # noqa: PT018
    # The forward before the collective, it, what is after it, and the backward.
    assert re.findall(r"<title>(.*?)</title>", picture) == [
        "forward: 2.00 s",
        "all_reduce tp: down: 3.00 s",
        "backward: 3.00 s",
    ]


def test_zero_3_receives_three_halves_of_the_bytes_of_data_parallelism() -> None:
    # Backward reads each of these parameters, as it does not those of an embedding, a bias or a first layer.
    model = nn.Sequential(nn.LayerNorm(40, bias=False), MLP())
    program = capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(20, 40))

    def received(strategy: Strategy) -> int:
        collectives = program.plan(strategy, {"dp": 4}).collectives
        return sum(one.received[0] for one in collectives if not one.cause.operation.startswith("the result"))

    data = received(Strategy(inputs=ROWS))
    assert data == 2 * 3 / 4 * 4 * (40 + 2 * 80 * 40)
    assert received(Strategy(inputs=ROWS, params=ROWS, use={"*": {}})) == 1.5 * data
