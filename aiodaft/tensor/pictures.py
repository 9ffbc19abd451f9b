"""A picture of a placement: the part of each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from aiodaft.tensor.shards import bounds
from aiodaft.tensor.specs import Placements, text

__all__ = ["picture"]

_WIDTH, _HEIGHT = 240, 120


def picture(shape: Sequence[int], placements: Placements, axes: Mapping[str, int]) -> str:
    """An SVG of a tensor with the ranks in their parts; of more than two dimensions, the sharded ones come first."""
    ranks = range(math.prod(axes.values()))
    dims = sorted(range(len(shape)), key=lambda dim: not any(one.is_shard(dim) for one in placements))
    rows, columns = [*sorted(dims[:2]), None, None][:2]
    by_part: dict[tuple[tuple[int, int], ...], list[int]] = {}
    try:
        for rank in ranks:
            by_part.setdefault(tuple(bounds(shape, placements, axes, rank)), []).append(rank)
    except ValueError:
        return f"<p>{', '.join(map(text, placements))}</p>"
    boxes = []
    for part, held in by_part.items():
        y, down = _scaled(part, rows, shape, _HEIGHT)
        x, right = _scaled(part, columns, shape, _WIDTH)
        boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{right:.1f}" height="{down:.1f}" fill="none"'
            f' stroke="currentColor"/><text x="{x + right / 2:.1f}" y="{y + down / 2:.1f}" fill="currentColor"'
            f' font-size="11" text-anchor="middle" dominant-baseline="middle">{", ".join(map(str, held))}</text>'
        )
    width, height = _WIDTH + 2, _HEIGHT + 2
    return f'<svg width="{width}" height="{height}" viewBox="-1 -1 {width} {height}">{"".join(boxes)}</svg>'


def _scaled(part: Sequence[tuple[int, int]], dim: int | None, shape: Sequence[int], size: int) -> tuple[float, float]:
    if dim is None or not shape[dim]:
        return 0.0, float(size)
    start, length = part[dim]
    return start * size / shape[dim], length * size / shape[dim]
