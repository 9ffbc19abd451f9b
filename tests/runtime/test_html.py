"""HTML for notebooks: texts cannot be markup, and nothing is longer than a page."""

from __future__ import annotations

from html_page import Page

from aiodaft.html import Branch, facts, page, table, tree

FORGED = '<script>alert("1")</script>'


def test_texts_cannot_be_markup_and_what_is_long_is_cut() -> None:
    html = page(FORGED, table([FORGED], [[FORGED]]), facts({FORGED: FORGED}), tree([Branch(FORGED, [Branch(FORGED)])]))
    assert "<script" not in html
    read = Page(html)
    assert (read.title, read.rows) == (FORGED, [[FORGED], [FORGED], [FORGED, FORGED]])
    assert read.items == [(1, FORGED), (2, FORGED)]
    read = Page(page("long", table(["number"], [[number] for number in range(1000)]), tree([Branch("x")] * 1000)))
    assert (len(read.rows), read.rows[-1]) == (102, ["900 more"])
    assert (len(read.items), read.items[-1]) == (101, (1, "900 more"))
    assert len(page("x" * 1_000_000)) < 1000
    assert page("nothing", table(["head"], []), tree([])) == page("nothing")
