"""Finds sentences that hide a noun behind "what", "who", "where" or "how".

`python tests/support/plain_words.py FOLDER` lists those in docstrings, comments, texts of errors and pages;
not those in code, questions and indirect questions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK, QUOTED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL), re.compile(r"``?[^`]+``?")
COMMENT, COMMENT_OF_LINE = re.compile(r"\s*# ?(.*)"), re.compile(r".*\S  # (.*)")
PARAGRAPH = re.compile(r"\n(?:\s*\n)*(?=\s*(?:[-*#|]|\d+\.) |\s*\n)")
END = re.compile(r"(?<=[.!?:])[\")]*\s+|\s\|\s|\n\s*\n")

BEGINS = re.compile(r"(?:What|Who|Whoever|Whatever|Where|How) \w")
# An indirect question may follow one of these.
ASKS = re.compile(
    r"asks?|checks?|decides?|describes?|documents?|explains?|finds?|found|knows?|known|knew|learns?|matters?|prints?|says?"
    r"|said|sees?|seen|shows?|shown|tells?|told|tests?"
)
HEADLESS = re.compile(
    r"(?P<before>\w*) ?\b(?:what|whatever|whoever)\b(?! if\b|:)"
    r"|(?:[,;:] |\b(?:and|or|but|to|of|for|by|is|in|from|on|with|as|than) )who\b"
)


class Mark(NamedTuple):
    path: Path
    line: int
    sentence: str


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page; the docstrings, texts of errors and comments of a source file; with their lines."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from paragraphs(BLOCK.sub(lambda block: "\n" * block[0].count("\n"), source))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise):
            yield node.lineno, " ".join(strings(node))
    comment, begins = "", 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if match := COMMENT.fullmatch(line):
            comment, begins = (f"{comment} {match[1]}", begins) if comment else (match[1], number)
            continue
        if comment:
            yield begins, comment
        comment = ""
        if match := COMMENT_OF_LINE.fullmatch(line):
            yield number, match[1]


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    begins = 0
    for end in [*(match.start() for match in PARAGRAPH.finditer(page)), len(page)]:
        part = page[begins:end]
        yield 1 + page.count("\n", 0, begins + len(part) - len(part.lstrip())), part
        begins = end


def strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "x" for piece in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    for line, text in texts(path):
        for sentence in END.split(QUOTED.sub("x", text)):
            if words := " ".join(sentence.strip(" \n*_|-#>(\"'0123456789.").split()):
                yield line, words


def hides_a_noun(sentence: str) -> bool:
    if sentence.endswith("?"):
        return False
    headless = (match for match in HEADLESS.finditer(sentence) if not ASKS.fullmatch(match["before"] or ""))
    return bool(BEGINS.match(sentence) or next(headless, None))


def count(paths: list[Path]) -> tuple[int, list[Mark]]:
    """The number of words in these files, and the sentences that hide a noun."""
    words, marks = 0, []
    for path in paths:
        for line, sentence in sentences(path):
            words += len(sentence.split())
            marks += [Mark(path, line, sentence)] if hides_a_noun(sentence) else []
    return words, marks


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.suffix in (".py", ".md")) if place.is_dir() else [place]


def main() -> None:
    for place in map(Path, sys.argv[1:]):
        words, marks = count(files(place))
        for mark in marks:
            print(f"{mark.path}:{mark.line}: {mark.sentence}")
        print(f"{place}: {len(marks)} in {words:,} words")


if __name__ == "__main__":
    main()
