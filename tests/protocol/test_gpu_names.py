"""The names in CUDA_VISIBLE_DEVICES lead to GPUs of the machine; names that CUDA would not take count for nothing."""

from __future__ import annotations

import pytest

from aiodaft._protocol.node.resources import Gpu, device_named, gpu_names

GPUS = [Gpu("nvidia0", "GPU-a1"), Gpu("nvidia1", "GPU-b2"), Gpu("nvidia2", "GPU-c3")]
# Not used since the machine started, so that the driver has not told their ids.
FRESH = [Gpu("nvidia0"), Gpu("nvidia1")]


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2, GPU-b,MIG-7", ["2", "GPU-b", "MIG-7"]),
        # An entry that names no GPU ends the list.
        ("2,-1,1", ["2"]),
        ("1,,0", ["1"]),
        ("0,9,1", ["0"]),
        ("0,gpu1,1", ["0"]),
        ("GPU-a1,GPU-d4,GPU-b2", ["GPU-a1"]),
        ("all", []),
        ("NoDevFiles", []),
        # CUDA finds none with one of them twice.
        ("1,1", []),
        ("MIG-GPU-a1/1/0,MIG-GPU-a1/2/0", ["MIG-GPU-a1/1/0", "MIG-GPU-a1/2/0"]),
    ],
)
def test_the_gpus_of_a_process_are_those_that_cuda_would_find(allowed: str | None, names: list[str]) -> None:
    assert gpu_names(GPUS, allowed) == names


def test_names_are_taken_as_they_are_where_the_machine_does_not_tell() -> None:
    assert gpu_names([], "5,GPU-abc,x,1") == ["5", "GPU-abc"]
    assert gpu_names(FRESH, "GPU-abc") == ["GPU-abc"]
    assert gpu_names([], None) == []


def test_what_is_declared_beyond_what_there_is_gets_a_number_that_no_gpu_has() -> None:
    assert gpu_names(GPUS, None, 2) == ["0", "1"]
    assert gpu_names(GPUS, None, 5) == ["0", "1", "2", "3", "4"]
    assert gpu_names([], None, 2) == ["0", "1"]
    assert gpu_names(GPUS, "2,GPU-b", 1) == ["2"]
    # Not one that this process may not use, and none twice.
    assert gpu_names(GPUS, "2,GPU-b", 4) == ["2", "GPU-b", "3", "4"]
    assert gpu_names([], "1", 3) == ["1", "0", "2"]
    # A program that hides the GPUs from itself alone.
    assert gpu_names(GPUS, "", 2) == ["0", "1"]
    assert gpu_names(GPUS, None, "2") == gpu_names(GPUS, None, -1) == []


def test_a_gpu_is_claimed_by_its_device_whatever_it_is_called() -> None:
    names = ["2", "GPU-c", "GPU-c3", "GPU-d", "MIG-7", "9"]
    assert [device_named(name, GPUS) for name in names] == ["nvidia2", "nvidia2", "nvidia2", "", "MIG-7", ""]
    assert [device_named(name, FRESH) for name in names] == ["", "GPU-c", "GPU-c3", "GPU-d", "MIG-7", ""]
    assert [device_named(name, []) for name in names] == [""] * 6
