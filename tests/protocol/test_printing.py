"""The output of many processes, on one terminal."""

from __future__ import annotations

import pytest

from aiodaft._protocol.diagnostics.printing import MAX_LINE, Printed, Screen


def in_pieces(text: bytes, size: int) -> tuple[list[str], str]:
    """The lines, and the incomplete one, of something that comes in pieces."""
    printed = Printed()
    lines: list[str] = []
    for start in range(0, len(text), size):
        lines += printed.take(text[start : start + size])
    return lines, printed.line


@pytest.mark.parametrize(
    ("text", "lines", "line"),
    [
        (b"one\ntwo\n", ["one", "two"], ""),
        (b"one\r\ntwo\r\n", ["one", "two"], ""),
        (b"one\n\nthr", ["one", ""], "thr"),
        (b"\r 10%\r 50%\r100%\ndone", ["100%"], "done"),
        (b"10%\r50%\r", [], "50%"),
        (b"10%\r50%\r\n", ["50%"], ""),
        (b"\r 50%\r     \rdone\n", ["done"], ""),
        ("\r50% ██\rdone ✓\n".encode(), ["done ✓"], ""),
        (b"\xff\n", ["\\xff"], ""),
        (b"half " + "█".encode()[:2], [], "half "),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_of_each_line_the_last_state_counts_wherever_it_is_cut(
    text: bytes, lines: list[str], line: str, size: int
) -> None:
    assert in_pieces(text, size) == (lines, line)


def test_a_line_that_was_written_over_is_a_bar_until_it_is_complete() -> None:
    printed = Printed()
    seen: list[bool] = []
    for piece in (b"a", b"b\rc", b"d", b"\n", b"e"):
        printed.take(piece)
        seen.append(printed.is_bar)
    assert seen == [False, True, True, False, False]


def test_what_is_left_at_the_end_is_a_line() -> None:
    printed = Printed()
    assert printed.take(b"\r10%\r20%") == []
    assert printed.take(b"") == ["20%"]
    assert printed.take(b"") == []


def test_a_long_line_is_cut_and_a_long_lived_bar_is_not() -> None:
    printed = Printed()
    assert printed.take(b"x" * (MAX_LINE + 1)) == ["x" * (MAX_LINE + 1)]
    for step in range(10_000):
        assert printed.take(b"\r%d" % step) == []
    assert printed.take(b"\n") == ["9999"]


class Terminal:
    """Both streams on one terminal, as one sees it."""

    def __init__(self) -> None:
        self.screen = Screen()
        self.text = ""
        self.now = 0.0

    def show(self, writer: str, line: str, *, complete: bool = False, is_bar: bool = False, stream: int = 2) -> None:
        text = f"({writer}) {line}"
        shown = self.screen.show((writer, stream), stream, text, self.now, complete=complete, is_bar=is_bar)
        self.text += "".join(text for _, text in shown)

    @property
    def lines(self) -> list[str]:
        lines: list[str] = []
        for line in self.text.split("\n"):
            seen = ""
            for state in line.split("\r"):
                seen = state + seen[len(state) :]
            lines.append(seen.rstrip())
        return lines


def test_a_line_without_a_newline_is_shown_as_it_grows() -> None:
    terminal = Terminal()
    terminal.show("a", "part 1...")
    assert terminal.text == "(a) part 1..."
    terminal.show("a", "part 1...part 2", complete=True)
    assert terminal.text == "(a) part 1...part 2\n"


def test_a_bar_moves_and_leaves_nothing_of_longer_states() -> None:
    terminal = Terminal()
    for state in ("step 10 of 10", "step 9", "step 9"):
        terminal.show("a", state, is_bar=True)
        assert terminal.lines == [f"(a) {state}"]
    terminal.show("a", "done", complete=True)
    assert terminal.lines == ["(a) done", ""]


@pytest.mark.parametrize("stream", [1, 2])
def test_lines_of_others_go_above_a_bar_and_end_an_incomplete_line_which_then_is_shown_anew(stream: int) -> None:
    terminal = Terminal()
    terminal.show("a", "10%", is_bar=True)
    terminal.show("b", "hello", complete=True, stream=stream)
    assert terminal.lines == ["(b) hello", "(a) 10%"]
    terminal.show("a", "20%", is_bar=True)
    assert terminal.lines == ["(b) hello", "(a) 20%"]
    terminal.show("b", "typing", stream=stream)
    assert terminal.lines == ["(b) hello", "(b) typing"]
    terminal.show("a", "30%", complete=True)
    terminal.show("b", "typing more", complete=True, stream=stream)
    assert terminal.lines == ["(b) hello", "(b) typing", "(a) 30%", "(b) typing more", ""]


def test_bars_take_turns_and_all_of_them_are_complete_in_the_end() -> None:
    terminal = Terminal()
    for percent in range(0, 100, 10):
        for writer in ("a", "b", "c"):
            terminal.show(writer, f"{percent}%", is_bar=True)
    assert terminal.lines == ["(a) 90%"]
    # Each has the place for a second.
    terminal.now = 1.0
    terminal.show("b", "91%", is_bar=True)
    terminal.show("c", "91%", is_bar=True)
    assert terminal.lines == ["(b) 91%"]
    terminal.now = 2.0
    terminal.show("c", "92%", is_bar=True)
    terminal.show("b", "92%", is_bar=True)
    assert terminal.lines == ["(c) 92%"]
    terminal.show("b", "100%", complete=True)
    assert terminal.lines == ["(b) 100%", "(c) 92%"]
    terminal.show("c", "100%", complete=True)
    terminal.show("a", "100%", complete=True)
    assert terminal.lines == ["(b) 100%", "(c) 100%", "(a) 100%", ""]


def test_each_text_goes_to_the_stream_of_its_line() -> None:
    screen = Screen()
    assert screen.show("a", 2, "bar", 0.0, complete=False, is_bar=True) == [(2, "bar")]
    assert screen.show("b", 1, "line", 0.0, complete=True) == [(2, "\r   \r"), (1, "line\n"), (2, "bar")]
    assert screen.leave() == [(2, "\r   \r")]
    assert screen.show("a", 2, "part", 0.0, complete=False) == [(2, "part")]
    assert screen.show("b", 1, "line", 0.0, complete=True) == [(2, "\n"), (1, "line\n")]
    assert screen.leave() == []
