"""The target of `Ref.into()`: a tensor that exists already.

A transport writes the bytes of a tensor that has the target's layout in memory straight into the target. Any other
value is brought here first, and copied.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from aiodaft._runtime.platform.threads import SYNC_COPY
from aiodaft._runtime.serialization.decoder import is_tensor, spec_of
from aiodaft._runtime.serialization.encoded import fills_its_span, is_dense_tensor, loaded_torch, same_strides

if TYPE_CHECKING:
    import torch

    from aiodaft._runtime.objects.store import Store


class IntoTensor:
    def __init__(self, target: Any, label: str) -> None:
        """Raises TypeError: the target is no tensor that has memory. ValueError: elements of it share memory."""
        self._label = label
        if not is_dense_tensor(target) or target.device.type == "meta":
            kind = "a meta tensor" if is_dense_tensor(target) else type(target).__name__
            raise TypeError(f"the result of {label} cannot be written into {kind}: `into` takes a tensor")
        if any(step == 0 and length > 1 for length, step in zip(target.shape, target.stride(), strict=True)):
            raise ValueError(f"the result of {label} cannot be written into an expanded tensor: its elements overlap")
        self.target: torch.Tensor = target
        self.filled = False

    def fits(self, payload: bytes, nbytes: int) -> bool:
        """Whether a value is one block with exactly the bytes of the target.

        Raises:
            ValueError: It is a tensor of another shape or dtype.
        """
        if not is_tensor(payload):
            return False
        _, dtype, size, stride, start, _, _ = spec_of(payload)
        target = self.target
        self._check(size, f"torch.{dtype}")
        alike = not start and nbytes == target.nbytes and same_strides(size, stride, target.stride())
        return alike and not (target.is_conj() or target.is_neg()) and fills_its_span(target)

    async def fill(self, fetching: Awaitable[None]) -> None:
        # Tells autograd, and code that reads the target at the same time.
        self._count_write()
        try:
            await fetching
        finally:
            self._count_write()
        self.filled = True

    def _count_write(self) -> None:
        torch = loaded_torch()
        assert torch is not None
        torch.autograd.graph.increment_version(self.target)

    async def copy(self, value: Any, store: Store) -> None:
        """Copy a value into the target, in the helper thread if that takes long.

        Raises:
            TypeError: It is no tensor.
            ValueError: It has another shape or dtype.

        Cancellation: after the copy.
        """
        if value is self.target:
            return
        if not is_dense_tensor(value):
            raise TypeError(
                f"the result of {self._label} is {type(value).__name__}, and `into` writes a tensor into a tensor"
            )
        self._check(value.shape, str(value.dtype))
        # Between host and device, the copy waits for the streams.
        if self.target.nbytes > SYNC_COPY or value.device != self.target.device:
            await store.run_to_end(lambda: self._write(value))
        else:
            self._write(value)

    def _write(self, value: torch.Tensor) -> None:
        self.target.detach().copy_(value.detach())

    def _check(self, size: Any, dtype: str) -> None:
        target = self.target
        if list(size) != list(target.shape) or dtype != str(target.dtype):
            raise ValueError(
                f"the result of {self._label} has shape {tuple(size)} and {dtype}, "
                f"and cannot be written into a tensor of shape {tuple(target.shape)} and {target.dtype}"
            )
