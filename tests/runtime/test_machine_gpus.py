"""Facts about a machine's GPUs, and about CUDA in a process, that are found without CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cuda_library import fake_cuda

from aiodaft._protocol.node.resources import Gpu
from aiodaft._runtime.process import has_initialized_cuda, machine_gpus

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 18
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.a5.00.01
Bus Location: \t {place}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def test_gpus_are_those_of_the_driver_that_have_device_files(tmp_path: Path) -> None:
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()

    def found() -> list[Gpu]:
        return machine_gpus(str(driver), str(devices))

    assert machine_gpus(str(driver), str(tmp_path / "nowhere")) == found() == []
    for minor, place, uuid in (("1", "0000:81:00.0", "GPU-b2"), ("0", "0000:01:00.0", "GPU-????????-????")):
        (driver / place).mkdir(parents=True)
        (driver / place / "information").write_text(INFORMATION.format(uuid=uuid, place=place, minor=minor))
    # Before the first use there are no device files, and one GPU has not told its id.
    assert found() == [Gpu("nvidia0"), Gpu("nvidia1", "GPU-b2")]
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia1"):
        (devices / name).touch()
    assert found() == [Gpu("nvidia1", "GPU-b2")]


def test_a_sandbox_has_device_files_alone_and_some_drivers_say_little(tmp_path: Path) -> None:
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()
    (driver / "0000:01:00.0").mkdir(parents=True)
    assert machine_gpus(str(driver), str(devices)) == [Gpu("0000:01:00.0")]
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-modeset"):
        (devices / name).touch()
    assert machine_gpus(str(driver), str(devices)) == [Gpu("nvidia2"), Gpu("nvidia10")]
    assert machine_gpus(str(tmp_path / "nowhere"), str(devices)) == [Gpu("nvidia2"), Gpu("nvidia10")]


def test_a_process_knows_whether_it_has_initialised_cuda(tmp_path: Path) -> None:
    assert not has_initialized_cuda()
    library = fake_cuda(tmp_path)
    if library is None:
        pytest.skip("there is no compiler of C")
    code = (
        "import ctypes, sys\n"
        "from aiodaft._runtime.process import has_initialized_cuda\n"
        "assert not has_initialized_cuda()\n"
        "cuda = ctypes.CDLL(sys.argv[1])\n"
        "assert not has_initialized_cuda()\n"
        "cuda.cuInit(0)\n"
        "assert has_initialized_cuda()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(library)], check=True)
