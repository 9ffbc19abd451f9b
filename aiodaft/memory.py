"""Tensors in shared memory: what is produced there is shared already, and is never copied."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiodaft._runtime.current import current_peer

if TYPE_CHECKING:
    import torch

__all__ = ["empty"]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that other processes can map.

    Returned from a method, or passed to one, it travels without any copy. Do not write to it while others may read
    it: `await ref.released()` tells when nobody does. (A write in between is found out: the reader gets BorrowError.)

    Args:
        size: The shape, as numbers or as one sequence.
        dtype: The element type; torch's default, unless said.

    Raises:
        RuntimeClosed: No runtime surrounds the caller.
    """
    import torch  # noqa: PLC0415 - optional package

    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]  # as torch.empty
    dtype = dtype or torch.get_default_dtype()
    nbytes = shape.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    peer = current_peer()
    block = peer.store.transport.allocate(nbytes)
    flat = torch.frombuffer(block.view, dtype=torch.uint8, count=nbytes)
    storage: Any = flat.untyped_storage()
    peer.store.share(block.address, block)
    weakref.finalize(storage, peer.store.unshare, block.address).atexit = False
    return flat.view(dtype).view(shape)
