"""The binding of libcuda, against the library and against torch: `pytest -m gpu`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from aiodaft_transport.cuda.device import Span
from aiodaft_transport.cuda.libcuda import CudaDriver
from aiodaft_transport.exceptions import DeviceError, Unreachable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    opened = CudaDriver()
    yield opened
    opened.close()


def test_devices_are_those_of_torch_in_its_order(driver: CudaDriver) -> None:
    expected = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    found = [str(uuid.UUID(bytes=identity)) for identity in driver.identities]
    assert found == [text.removeprefix("GPU-") for text in expected]


def test_memory_is_copied_on_the_stream_of_torch(driver: CudaDriver) -> None:
    source = torch.arange(1 << 20, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    stream = torch.cuda.Stream()
    # Loads the kernels: that may wait for the GPU's work.
    source.add_(0)
    torch.cuda._sleep(1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.add_(1)
    driver.copy(0, [Span(target.data_ptr(), source.data_ptr(), source.nbytes)], stream.cuda_stream)
    event = driver.record(0, stream.cuda_stream)
    assert not driver.happened(event)
    driver.wait(event)
    assert driver.happened(event)
    driver.forget(event)
    assert torch.equal(target, source)


def test_memory_is_exported_as_the_allocation_it_is_in(driver: CudaDriver) -> None:
    address = driver.allocate(0, 4 << 20)
    export = driver.export(0, address + 12345)
    assert (export.address, len(export.handle)) == (address, 64)
    assert export.size >= 4 << 20
    driver.free(0, address)
    with pytest.raises(Unreachable, match="cannot open this GPU memory"):
        driver.export(0, address)


def test_too_much_memory_is_refused_with_the_driver_s_words(driver: CudaDriver) -> None:
    with pytest.raises(DeviceError, match=r"out of memory \(CUDA error 2\)"):
        driver.allocate(0, 1 << 50)


def test_nothing_is_pushed_that_is_not_popped(driver: CudaDriver) -> None:
    before = torch.cuda.current_device()
    last = torch.cuda.device_count() - 1
    driver.free(last, driver.allocate(last, 4 << 20))
    assert torch.cuda.current_device() == before
    assert torch.zeros(3, device="cuda").sum() == 0
