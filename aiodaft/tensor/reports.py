"""A plan as a text and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from aiodaft.tensor.operations import Cause, Input, Phase
from aiodaft.tensor.specs import Placements, Spec, bounds, text, unplaced

__all__ = ["described", "drawn", "picture", "place_of", "placed_text", "ranks_text", "size_text", "time_text"]

_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "update")
_ROW, _LEFT, _CELL = 18, 190, 300


def place_of(cause: Cause) -> str:
    where = ", ".join(one for one in (cause.module, cause.line, cause.phase) if one)
    return f"{cause.operation} ({where})"


def placed_text(spec: Spec, axes: Mapping[str, int]) -> str:
    given = unplaced(spec.placements, axes)
    return ", ".join(f"{axis}={text(one)}" for axis, one in given.items()) or "replicas"


def size_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def ranks_text(values: Sequence[int]) -> str:
    least, most = min(values, default=0), max(values, default=0)
    return size_text(most) if least == most else f"{size_text(least)} to {size_text(most)}"


def described(head: str, bytes_: Mapping[str, tuple[int, ...]], lines: Sequence[tuple[Cause, str, int, bool]]) -> str:
    totals = [f"{axis}: {ranks_text(counts)} received by a rank" for axis, counts in bytes_.items()]
    counted: dict[tuple[str, str, bool], int] = {}
    for cause, title, times, written in lines:
        key = place_of(cause), title, written
        counted[key] = counted.get(key, 0) + times
    listed = [
        f"  {times} x {title}: {place}{'' if written else ' (implicit)'}"
        for (place, title, written), times in counted.items()
    ]
    return "\n".join([head, *totals, *listed])


def drawn(
    title: str,
    parameters: Sequence[tuple[Input, Spec]],
    collectives: Sequence[tuple[Cause, str, int]],
    axes: Mapping[str, int],
) -> str:
    modules: dict[str, None] = {}
    placements: dict[str, list[str]] = {}
    for one, spec in parameters:
        module, _, name = one.name.rpartition(".")
        modules[module] = None
        placements.setdefault(module, []).append(f"{name} {placed_text(spec, axes)}")
    cells: dict[tuple[str, str], dict[str, int]] = {}
    for cause, kind, times in collectives:
        modules[cause.module] = None
        here = cells.setdefault((cause.module, cause.phase), {})
        here[kind] = here.get(kind, 0) + times
    rows = "".join(_row(at, module, placements.get(module, ()), cells) for at, module in enumerate(modules, 2))
    heads = "".join(_text(_LEFT + _CELL * at, 1, head, bold=True) for at, head in enumerate(("parameters", *_PHASES)))
    width, height = _LEFT + 4 * _CELL, _ROW * (len(modules) + 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        f' font-size="11" fill="currentColor">{_text(4, 0, title, bold=True)}{heads}{rows}</svg>'
    )


def _row(at: int, module: str, placements: Sequence[str], cells: Mapping[tuple[str, str], Mapping[str, int]]) -> str:
    found = [
        ", ".join(f"{times} x {kind}" for kind, times in cells.get((module, phase), {}).items()) for phase in _PHASES
    ]
    texts: Iterator[tuple[int, str]] = enumerate(("; ".join(placements), *found))
    return _text(4, at, module or "(the function)") + "".join(_text(_LEFT + _CELL * n, at, one) for n, one in texts)


def _text(x: int, row: int, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{_ROW * (row + 1)}"{weight}>{escape(words)}</text>' if words else ""


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
