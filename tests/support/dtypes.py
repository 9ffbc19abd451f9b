"""Every type that the elements of a tensor can have."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = [
    dtype
    for name in sorted(dir(torch))
    if isinstance(dtype := getattr(torch, name), torch.dtype)
    and str(dtype) == f"torch.{name}"
    and not name.startswith("q")
]
_CARRIER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The content of a tensor, for dtypes that cannot be compared or copied."""
    return tensor.detach().view(_CARRIER[tensor.element_size()]).contiguous().cpu().numpy().tobytes()
