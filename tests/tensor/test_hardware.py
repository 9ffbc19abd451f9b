"""Hardware: the time of a collective by the links that it passes, and its form as JSON."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from aiodaft.tensor.hardware import PRESETS, Hardware, Link

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
