"""Ways to combine tensors of members that are wrong, late or far away: robust means, codecs, gradient codes.

Needs torch. Robust means and `total` are functions of the list of all values, for a collective as `OfAll(median)`, and
for `all_gather`:

    sums = aiodaft.all_reduce(codes, OfAll(aggregation.total), algorithm="exchange")  # each gets all codes, and adds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Final, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Code",
    "Codec",
    "Encoder",
    "GradientCode",
    "Int8",
    "LowRank",
    "Ternary",
    "TopK",
    "flag_median",
    "median",
    "total",
    "trimmed_mean",
]

T = TypeVar("T")
Parts = tuple[Tensor, ...]

# Digits of base 3 in a byte.
_TRITS: Final = 5
# Iterations of the flag median.
_STEPS: Final = 10
# Of the start of an iteration, beside the last value.
_NOISE: Final = 1e-3


def median(values: Sequence[Tensor]) -> Tensor:
    """The median of each element; of an even number of values, the mean of the two in the middle."""
    return trimmed_mean(values, (len(values) - 1) // 2)


def trimmed_mean(values: Sequence[Tensor], trim: int) -> Tensor:
    """The mean of each element, without its `trim` smallest and largest values.

    Raises:
        ValueError: No value is left.
    """
    if not 0 <= 2 * trim < len(values):
        raise ValueError(f"trim={trim} at both ends leaves nothing of {len(values)} values")
    return torch.stack(list(values)).sort(0).values[trim : len(values) - trim].mean(0)


def flag_median(values: Sequence[Tensor], dimension: int = 1) -> Tensor:
    """The mean of the values in the subspace that is nearest to their directions, with their median length.

    As the Flag Aggregator finds it (https://arxiv.org/abs/2302.05865), by weights that grow with the nearness.

    Args:
        values: Tensors of one shape; fewer than half of them may be anything finite.
        dimension: That of the subspace.

    Raises:
        ValueError: The dimension is not one of 1 to the number of values.
    """
    if not 1 <= dimension <= len(values):
        raise ValueError(f"a subspace of {len(values)} values has no dimension {dimension}")
    rows = torch.stack(list(values)).flatten(1)
    lengths = rows.norm(dim=1)
    rows = rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny).unsqueeze(1)
    gram = (rows @ rows.T).double()
    basis, inside = _subspace(gram, gram.new_ones(len(rows)), dimension)
    for _ in range(_STEPS):
        nearness = inside.square().sum(1)
        basis, inside = _subspace(gram, (1 - nearness).clamp_min(1e-6).rsqrt(), dimension)
    mean = (basis @ inside.mean(0)).to(rows.dtype) @ rows
    return torch.mul(mean, lengths.median()).reshape(values[0].shape)


def _subspace(gram: Tensor, weights: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """A basis, as sums of the weighted rows, and the rows in it."""
    roots = weights.sqrt()
    sizes, vectors = torch.linalg.eigh(roots.unsqueeze(1) * gram * roots)
    basis = roots.unsqueeze(1) * vectors[:, -dimension:] / sizes[-dimension:].clamp_min(1e-12).sqrt()
    return basis, gram @ basis


class Codec(Protocol):
    """Makes a tensor shorter, by leaving something out."""

    def encode(self, value: Tensor, before: Parts) -> Parts:
        """The tensors that travel; `before` has those of the last value, () at first."""
        ...

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor: ...


@dataclass(frozen=True)
class Int8:
    """8 bits for an element, and a scale: n + 4 bytes of n elements."""

    def encode(self, value: Tensor, before: Parts) -> Parts:
        scale = (value.abs().max().float().reshape(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (value / scale).round().to(torch.int8), scale

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        return parts[0] * parts[1]


@dataclass(frozen=True)
class TopK:
    """The elements that are furthest from 0, with their places: 8 bytes for each, of float32.

    Attributes:
        share: Of all elements; at least one travels.

    Raises:
        ValueError: The share is not over 0, or over 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: a share of all elements is over 0, and at most 1")

    def encode(self, value: Tensor, before: Parts) -> Parts:
        flat = value.flatten()
        places = flat.abs().topk(max(1, int(self.share * len(flat)))).indices
        return flat[places], places.int()

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        kept, places = parts
        return kept.new_zeros(shape.numel()).index_copy_(0, places.long(), kept).reshape(shape)


@dataclass(frozen=True)
class Ternary:
    """-1, 0 or 1 times a scale, five elements in a byte: n / 5 bytes, rounded up, and 4 for the scale."""

    _powers: ClassVar[Tensor] = 3 ** torch.arange(_TRITS)

    def encode(self, value: Tensor, before: Parts) -> Parts:
        flat = value.flatten()
        large = flat.abs() > 0.7 * flat.abs().mean()
        scale = flat.abs()[large].mean().float().nan_to_num().reshape(1)
        digits = torch.where(large, flat.sign(), 0).long() + 1
        padded = torch.nn.functional.pad(digits, (0, -len(flat) % _TRITS)).reshape(-1, _TRITS)
        return (padded * self._powers.to(flat.device)).sum(1).to(torch.uint8), scale

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        packed, scale = parts
        digits = packed.long().unsqueeze(1) // self._powers.to(packed.device) % 3
        return (digits.flatten()[: shape.numel()] - 1).reshape(shape) * scale


@dataclass(frozen=True)
class LowRank:
    """A matrix of m by n as the product of two: rank * (m + n) elements. A tensor of fewer dimensions travels whole.

    By one step of power iteration from the last value, as in PowerSGD (https://arxiv.org/abs/1905.13727), but of the
    matrix of each member.

    Raises:
        ValueError: The rank is not positive; for encoding: it is larger than the matrix.
    """

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: a rank is positive")

    def encode(self, value: Tensor, before: Parts) -> Parts:
        if value.dim() < 2:
            return (value,)
        # The decomposition has no narrower dtype.
        matrix = value.flatten(1).to(torch.promote_types(value.dtype, torch.float32))
        if self.rank > min(matrix.shape):
            raise ValueError(f"rank={self.rank} is over that of a matrix of {' by '.join(map(str, matrix.shape))}")
        start = torch.randn(matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(0)).to(matrix)
        if before:
            # A little of all directions: this value may have none of those of the last one.
            last = before[1].to(matrix)
            start = last / last.norm().clamp_min(torch.finfo(matrix.dtype).tiny) + _NOISE * start
        columns = torch.linalg.qr(matrix @ start).Q.to(value.dtype)
        return columns, value.flatten(1).T @ columns

    def decode(self, parts: Parts, shape: torch.Size) -> Tensor:
        return parts[0] if len(parts) == 1 else (parts[0] @ parts[1].T).reshape(shape)


@dataclass(frozen=True)
class Code:
    """A tensor as a codec has encoded it."""

    codec: Codec
    shape: torch.Size
    dtype: torch.dtype
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that travel."""
        return sum(part.nbytes for part in self.parts)

    def decode(self) -> Tensor:
        """The tensor, without all that was left out."""
        return self.codec.decode(self.parts, self.shape).to(self.dtype)


class Encoder:
    """Encodes the values of one tensor, step by step: all that a code leaves out is added to the next value."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._left: Tensor | None = None
        self._before: Parts = ()

    def encode(self, value: Tensor) -> Code:
        """The code of the value and of all that was left out so far.

        Raises:
            ValueError: The shape is not that of the values before, the value is empty or not finite, or the codec does
                not fit it. The encoder stays as it was.
        """
        left = self._left
        if left is not None and left.shape != value.shape:
            raise ValueError(f"this encoder is for a tensor of {list(left.shape)}, not {list(value.shape)}")
        with torch.no_grad():
            # A codec may send the tensor itself.
            whole = value.detach().clone() if left is None else value + left
            if not whole.numel() or not whole.isfinite().all():
                raise ValueError(
                    f"the tensor of {list(value.shape)} is empty or not finite: a code cannot stand for it"
                )
            code = Code(self.codec, whole.shape, whole.dtype, self.codec.encode(whole, self._before))
            self._left, self._before = whole - code.decode(), code.parts
        return code


def total(codes: Sequence[Code]) -> Tensor:
    """The sum of the tensors, in the order of ranks.

    Raises:
        ValueError: Their shapes differ.
    """
    for rank, code in enumerate(codes):
        if code.shape != codes[0].shape:
            raise ValueError(
                f"the codes disagree: rank 0 has a tensor of {list(codes[0].shape)}, rank {rank} of {list(code.shape)}"
            )
    return reduce(torch.add, [code.decode() for code in codes])


class GradientCode:
    """Each member adds up the gradients of several parts of the data, so that the sum of all is known without some.

    By Tandon et al. (https://arxiv.org/abs/1612.03301): member i has `late + 1` parts.

    Args:
        members: The number of members, and of parts.
        late: Members without which the sum has to be known.

    Raises:
        ValueError: There are no more members than those that may be late.
    """

    def __init__(self, members: int, late: int) -> None:
        if not 0 <= late < members:
            raise ValueError(f"late={late}: of {members} members, at most {members - 1} may be late")
        self.members, self.late = members, late
        self._shares = _repeated(members, late + 1) if members % (late + 1) == 0 else _cyclic(members, late)

    def parts(self, rank: int) -> dict[int, float]:
        """The parts of the data of a member, each with the factor of its gradient in the sum that the member makes."""
        row = self._shares[rank].tolist()
        return {part: share for part, share in enumerate(row) if share}

    def total(self, sums: Sequence[tuple[int, Tensor]]) -> Tensor:
        """The sum of the gradients of all parts, of the ranks of members with the sums that they have made.

        Raises:
            ValueError: There are too few, or two of one rank.
        """
        ranks = [rank for rank, _ in sums]
        if len(set(ranks)) != len(ranks) or len(ranks) < self.members - self.late:
            raise ValueError(f"sums of {self.members - self.late} of {self.members} members are needed, not of {ranks}")
        factors = (torch.linalg.pinv(self._shares[ranks].T) @ torch.ones(self.members, dtype=torch.float64)).tolist()
        whole: Tensor = reduce(torch.add, [factor * one for factor, (_, one) in zip(factors, sums, strict=True)])
        return whole


def _repeated(members: int, times: int) -> Tensor:
    """Each row has the parts of a block of rows: the code without rounding."""
    return torch.kron(torch.eye(members // times), torch.ones(times, times)).double()


def _cyclic(members: int, late: int) -> Tensor:
    """All rows are orthogonal to some random ones, as the sum of all parts is."""
    shares = torch.zeros(members, members, dtype=torch.float64)
    random = torch.randn(late, members, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    random[:, -1] = -random[:, :-1].sum(1)
    for rank in range(members):
        first, *others = ((rank + step) % members for step in range(late + 1))
        shares[rank, first] = 1
        shares[rank, others] = -torch.linalg.solve(random[:, others], random[:, first])
    return shares
