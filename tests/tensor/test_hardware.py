"""Hardware: the time of a collective by the links that it passes, and its form as JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import aiodaft
from aiodaft.tensor.hardware import PRESETS, Hardware, Link
from aiodaft.tensor.measuring import measure_hardware

RACKS = Hardware(
    compute={"float32": 1e12},
    memory=1e9,
    bandwidth=1e11,
    overhead=1e-6,
    links=(
        Link(devices=4, bandwidth=100.0, latency=1.0),
        Link(devices=16, bandwidth=10.0, latency=10.0),
        Link(devices=64, bandwidth=1.0, latency=100.0),
    ),
)


@pytest.mark.parametrize(
    ("kind", "members", "seconds"),
    [
        ("all_reduce", [0], 0),
        ("all_reduce", [0, 1], 1 + 800 / 100),
        ("all_gather", range(4), 2 * 1 + 800 / 100),
        # Each of the 4 of a node brings in a quarter.
        ("all_reduce", range(16), 4 * 10 + 800 / 4 / 10),
        ("all_reduce", range(0, 16, 4), 2 * 10 + 800 / 10),
        ("all_reduce", range(0, 64, 16), 2 * 100 + 800 / 1),
        ("all_reduce", range(64), 6 * 100 + 800 / 16 / 1),
        ("all_reduce", [1, 6], 10 + 800 / 10),
        # 12 of the 15 others are in other nodes, and each device has parts of its own.
        ("all_to_all", range(16), 4 * 10 + 800 * 12 / 15 / 10),
        ("send", [3, 4], 10 + 800 / 10),
    ],
)
def test_a_collective_takes_the_links_between_its_members(kind: str, members: list[int], seconds: float) -> None:
    assert RACKS.seconds(kind, 800, members) == pytest.approx(seconds)


def test_a_slow_device_slows_the_collectives_in_which_it_is() -> None:
    hardware = Hardware.from_json(RACKS.to_json().replace('"uneven": {}', '"uneven": {"1": {"links": 0.5}}'))
    assert hardware.seconds("all_reduce", 800, [0, 1]) == 1 + 800 / 50
    assert hardware.seconds("all_reduce", 800, [2, 3]) == 1 + 800 / 100
    assert (hardware.factor("links", 1), hardware.factor("compute", 1)) == (0.5, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_hardware_is_json(name: str) -> None:
    assert Hardware.from_json(PRESETS[name].to_json()) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('"devices": 4', '"devices": 5'),
            r"links join \[5, 16, 64\] devices: give at least one, each a multiple of the one before",
        ),
        (('"memory": 1000000000.0', '"memory": 0'), "memory is 0: give a positive number"),
        (('"overhead": 1e-06', '"overhead": -1'), "overhead is -1: give a number from 0 on"),
        (('"latency": 1.0', '"latency": NaN'), r"links\[0\].latency is nan: give a number from 0 on"),
        (('"memory"', '"ram"'), "hardware is an object of JSON with compute, memory, .*'ram'"),
        (('"uneven": {}', '"uneven": {"2": {"speed": 2}}'), r"uneven\[2\] has speed: give bandwidth, compute, links"),
    ],
)
def test_wrong_hardware_is_refused_with_its_field(change: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Hardware.from_json(RACKS.to_json().replace(*change))


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no rate of compute for bfloat16: it has float32"):
        RACKS.flops("bfloat16")


def test_an_operation_takes_what_it_computes_or_its_bytes_and_a_view_takes_a_processor() -> None:
    assert RACKS.work(1e12, 1e3, "float32", "aten.mm.default") == 1 + 1e-6
    assert RACKS.work(1e6, 1e11, "float32", "aten.mm.default") == 1 + 1e-6
    rated = replace(RACKS, rates={"aten.gelu": 1e10, "aten.attention": 1e9}, processors=2)
    assert rated.work(0, 1e10, "float32", "aten.gelu.default") == 1 + 1e-6
    assert rated.work(1e9, 1e3, "float32", "aten.attention.default") == 1 + 1e-6
    assert (RACKS.work(0, 0, "", "aten.t.default"), rated.work(0, 0, "", "aten.t.default")) == (0.0, 1e-6)


def test_a_message_may_have_a_latency_of_its_own() -> None:
    slow = replace(RACKS, links=(Link(devices=2, bandwidth=100.0, latency=1.0, message=5.0),))
    assert (slow.seconds("send", 800, [0, 1]), slow.seconds("all_gather", 800, [0, 1])) == (5 + 8, 1 + 8)


@pytest.mark.programs
@pytest.mark.asyncio(loop_scope="module")
async def test_hardware_is_measured_at_actors(module_rt: aiodaft.Runtime) -> None:
    found = await measure_hardware(module_rt, 2)
    assert Hardware.from_json(found.to_json()) == found
    assert (found.devices, len(found.links), found.processors > 0) == (2, 1, True)
    assert found.compute.keys() == {"float32", "float64", "bfloat16"}
    # Operations of layers, in both directions, and of the update.
    assert {"aten.gelu", "aten.native_layer_norm_backward", "aten.addcmul_", "aten._softmax"} <= found.rates.keys()
    assert found.rates.keys().isdisjoint({"aten.view", "aten.mm"})
    with pytest.raises(ValueError, match="ranks is 1: links are measured between at least 2"):
        await measure_hardware(module_rt, 1)
