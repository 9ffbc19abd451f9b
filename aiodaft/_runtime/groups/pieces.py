"""The pieces of tensors that a move of shards is made of: cut from a shard, packed into parcels, put into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from aiodaft._protocol.groups.reshard import Piece
from aiodaft._runtime.serialization.tensors import is_dense_tensor

if TYPE_CHECKING:
    import torch

# Name, dtype and shape of a tensor of a shard.
Expected: TypeAlias = tuple[str, str, tuple[int, ...]]


def check_shard(shard: object, rank: int, expected: Sequence[Expected]) -> None:
    """Compare a shard with its layout.

    Raises:
        TypeError: It is no dict of plain tensors.
        ValueError: Names, shapes or dtypes differ.
    """
    of = f"the shard of rank {rank} of the source"
    if not isinstance(shard, Mapping):
        raise TypeError(f"{of} is {type(shard).__name__}, and a dict of tensors is expected")
    for name, dtype, shape in expected:
        if name not in shard:
            raise ValueError(f"{of} has no {name!r}; its layout expects torch.{dtype} of shape {tuple(shape)}")
        tensor = shard[name]
        if not is_dense_tensor(tensor):
            raise TypeError(f"{name!r} in {of} is {type(tensor).__name__}, and a plain tensor is expected")
        if str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name!r} in {of} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"its layout expects torch.{dtype} of shape {tuple(shape)}"
            )
    surplus = shard.keys() - {name for name, _, _ in expected}
    if surplus:
        raise ValueError(f"{of} has {min(map(repr, surplus))}, which its layout does not expect there")


def _slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def target_part(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return tensors[piece.name][_slices(piece.target_start, piece.size)]


def source_part(shard: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return shard[piece.name].detach()[_slices(piece.source_start, piece.size)]


def shaped(flat: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    import torch  # noqa: PLC0415 - optional package

    kind: torch.dtype = getattr(torch, dtype)
    return flat.view(kind).view(tuple(shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as bytes."""
    import torch  # noqa: PLC0415 - optional package

    return tensor.view(-1).view(torch.uint8)


def pack(flat: torch.Tensor, shard: Mapping[str, torch.Tensor], pieces: Sequence[Piece]) -> None:
    at = 0
    for piece in pieces:
        given = source_part(shard, piece)
        flat[at : at + piece.nbytes].view(given.dtype).view(given.shape).copy_(given)
        at += piece.nbytes


def unpack(tensors: Mapping[str, torch.Tensor], flat: torch.Tensor, pieces: Sequence[Piece]) -> None:
    at = 0
    for piece in pieces:
        place = target_part(tensors, piece)
        place.copy_(flat[at : at + piece.nbytes].view(place.dtype).view(place.shape))
        at += piece.nbytes


def copy_pieces(
    tensors: Mapping[str, torch.Tensor], shard: Mapping[str, torch.Tensor], pieces: Sequence[Piece]
) -> None:
    for piece in pieces:
        target_part(tensors, piece).copy_(source_part(shard, piece))


def version_of(tensor: torch.Tensor) -> int | None:
    """The number of writes to a tensor, as torch counts them."""
    return None if tensor.is_inference() else tensor._version
