"""Reads HTML as a browser does: its tables, its lists, and whether it is well-formed."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The visible content of HTML.

    Attributes:
        title: The first text in bold type.
        rows: The cells of each row of its tables.
        items: The texts of its lists, each with the depth of its list.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.title = ""
        self.rows: list[list[str]] = []
        self.items: list[tuple[int, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"br", "div", "li", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}
        if tag == "br":
            self.handle_data("\n")
            return
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
        elif tag == "li":
            self.items.append((self._open.count("ul"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self._open[-1]
        if where == "strong":
            self.title += data
        elif where in {"td", "th"}:
            self.rows[-1][-1] += data
        else:
            assert where == "li", data
            depth, text = self.items[-1]
            self.items[-1] = depth, text + data

    @property
    def facts(self) -> dict[str, str]:
        """The rows that are a name and a value."""
        return {row[0]: row[1] for row in self.rows if len(row) == 2}
