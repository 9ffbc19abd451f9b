"""The HTML for notebooks: tables and trees without scripts, in which every text is escaped.

They have no colours of their own, so that they look right on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Final, NamedTuple

__all__ = ["Branch", "facts", "page", "table", "tree"]

_MOST: Final = 100
_LONGEST: Final = 500
_CELL: Final = ' style="text-align: left"'


class Branch(NamedTuple):
    """A text, and its inner texts."""

    text: str
    inner: Sequence[Branch] = ()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a head; nothing if it has no rows."""
    if not rows:
        return ""
    shown = [f"<tr>{_cells('td', row)}</tr>" for row in islice(rows, _MOST)]
    if len(rows) > _MOST:
        shown.append(f'<tr><td colspan="{len(head)}"{_CELL}>{len(rows) - _MOST} more</td></tr>')
    return f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{''.join(shown)}</tbody></table>"


def facts(pairs: Mapping[str, object]) -> str:
    """A table of names with their values, without those that are empty."""
    rows = (f"<tr>{_cells('th', [name])}{_cells('td', [value])}</tr>" for name, value in pairs.items() if value != "")
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def tree(branches: Sequence[Branch]) -> str:
    """Texts with those that belong to them below; nothing if there are none."""
    if not branches:
        return ""
    shown = [f"<li>{_text(branch.text)}{tree(branch.inner)}</li>" for branch in islice(branches, _MOST)]
    if len(branches) > _MOST:
        shown.append(f"<li>{len(branches) - _MOST} more</li>")
    return f"<ul>{''.join(shown)}</ul>"


def page(title: str, *parts: str) -> str:
    """A title, and the parts below it; each of these is HTML."""
    return f"<div><strong>{_text(title)}</strong>{''.join(parts)}</div>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}{_CELL}>{_text(value)}</{tag}>" for value in values)


def _text(value: object) -> str:
    text = str(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return escape(shown).replace("\n", "<br>")
