"""A sequence of rows in contiguous parts, one for each member. Pure."""

from __future__ import annotations

from itertools import pairwise


def even_shares(rows: int, count: int) -> list[slice]:
    """Parts whose sizes differ by at most one, the larger ones first, as of `torch.tensor_split`; some may be empty."""
    size, more = divmod(rows, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(starts)]
