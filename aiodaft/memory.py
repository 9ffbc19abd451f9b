"""Memory of values: made shared, registered or lent, so that nothing is copied, or only read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import current_process
from aiodaft._runtime.serialization.encoded import fills_its_span, is_dense_tensor
from aiodaft.reading import borrow, read_only

if TYPE_CHECKING:
    import torch

__all__ = ["Registration", "borrow", "empty", "read_only", "register"]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that other processes can map.

    As an argument or result of a method it travels without a copy. Do not write to it while other processes may read
    it: `await ref.released()` returns when none does. (An earlier write is detected: the reader gets BorrowError.)
    A forked child (`multiprocessing` with "fork") shares the tensor, and sees what the parent writes.

    Args:
        size: The shape, as numbers or as one sequence.
        dtype: The element type. Default: torch's.

    Raises:
        RuntimeClosed: No runtime surrounds the caller.
    """
    import torch  # noqa: PLC0415 - optional package

    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]  # as torch.empty
    return current_process().part(Store).empty(shape, dtype or torch.get_default_dtype())


class Registration:
    """The result of `register`: leave its `with` block, or close it, to end the registration."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def close(self) -> None:
        """End the registration; transfers that are under way go on. Idempotent."""
        self._end()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def register(tensor: torch.Tensor) -> Registration:
    """Register the memory of a tensor once, to send it or receive into it (`ref.into(tensor)`) any number of times.

    Consumers read the tensor, or a part of it, in place, as with `empty()`: do not write to it while other processes
    may read it (`await ref.released()` returns when none does; an argument is read until the call has ended). Over
    `ucx` this saves the copy and the preparation of memory for each transfer, over `tcp` the copy. Over `shm` it
    changes nothing: processes can only map memory that was made shared, so the value is copied; use `empty()` there.

    The registration ends with `close()`, or with the tensor's storage, which must not be resized meanwhile. Dropping
    the `Registration` does not end it.

    Args:
        tensor: A CPU tensor without gaps: contiguous, or transposed, or channels last.

    Raises:
        TypeError: It is not a plain tensor, but sparse, a subclass of Tensor, or not of torch.
        ValueError: It is not on the CPU, has gaps, or part of its memory is registered already.
        RuntimeClosed: No runtime surrounds the caller.
    """
    if not is_dense_tensor(tensor):
        layout = getattr(tensor, "layout", None)
        kind = type(tensor).__name__ if layout is None else f"a {type(tensor).__name__} of layout {layout}"
        raise TypeError(f"register() takes a plain tensor, not {kind}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"register() takes a tensor in the memory of the CPU, not one on {tensor.device} "
            "(one on a GPU needs no preparation: borrow() sends it from where it lies, and into() writes to it)"
        )
    if not fills_its_span(tensor):
        raise ValueError("register() takes a tensor without gaps: register its base, or a contiguous copy")
    store = current_process().part(Store)
    if not tensor.nbytes:
        return Registration(lambda: None)
    address = tensor.data_ptr()
    store.register(address, tensor.nbytes)
    end = weakref.finalize(tensor.untyped_storage(), store.unregister, address)
    end.atexit = False
    return Registration(end)
