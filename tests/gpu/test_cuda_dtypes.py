"""CUDA tensors of every dtype, in every shape and from every place, arrive as they were: `pytest -m gpu` (row DP8)."""

from __future__ import annotations

import pytest
import pytest_asyncio
import torch
from cuda_actors import GpuKeeper
from dtypes import DTYPES, as_bytes
from on_gpu import MIB, ON_ONE_LOOP, keepers

import aiodaft

pytestmark = ON_ONE_LOOP


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_runtime: aiodaft.Runtime) -> GpuKeeper:
    (keeper,) = await keepers(shared_runtime, 1)
    return keeper


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_in_every_shape(shared: GpuKeeper, dtype: torch.dtype) -> None:
    values: list[torch.Tensor] = []
    for shape in ((), (0,), (1,), (3, 5), (2, 0, 4), (4, 3, 2)):
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, device="cuda")
        tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype, device="cuda")
        values += [tensor, tensor.T if tensor.dim() == 2 else tensor]
    got = await shared.echo(values)
    for sent, came in zip(values, got, strict=True):
        assert (came.dtype, came.shape, came.device.type) == (sent.dtype, sent.shape, "cuda")
        if sent.numel():
            assert as_bytes(came) == as_bytes(sent)


async def test_strides_lazy_conjugates_and_channels_last_arrive_as_they_look(shared: GpuKeeper) -> None:
    x = torch.randn(4, 6, dtype=torch.complex64, device="cuda")
    image = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    values = [x.conj(), x.conj().imag, x.T, x[::2, 1::2], x[:, None].expand(4, 3, 6), image, x.real]
    got = await shared.echo(values)
    for sent, came in zip(values, got, strict=True):
        assert came.is_cuda
        assert torch.equal(came, sent)
    assert got[5].is_contiguous(memory_format=torch.channels_last)


async def test_what_autograd_knows_of_a_tensor_stays_where_it_was_computed(shared: GpuKeeper) -> None:
    leaf = torch.full((MIB,), 2.0, device="cuda", requires_grad=True)
    product = leaf * 3.0
    came_leaf, came_product, detached = await shared.echo([leaf, product, leaf.detach()])
    assert came_leaf.is_leaf
    assert came_leaf.requires_grad
    # The tensors that it was computed from are in another process.
    assert came_product.is_leaf
    assert came_product.requires_grad
    assert not detached.requires_grad
    (came_leaf * came_product).sum().backward()
    assert torch.equal(came_leaf.grad, product)
    product.sum().backward()
    assert float(leaf.grad.sum()) == 3.0 * MIB
    with torch.inference_mode():
        frozen = torch.full((MIB,), 4.0, device="cuda")
    assert float((await shared.echo(frozen)).sum()) == 4.0 * MIB
