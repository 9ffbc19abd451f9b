"""The output of many processes on one terminal: whole lines, and progress bars as they move. No I/O."""

from __future__ import annotations

import codecs
from collections.abc import Hashable
from typing import Final

# Seconds for which a bar keeps its place although others move.
_TURN: Final = 1.0
# A longer line is cut.
MAX_LINE: Final = 4 << 10


class Printed:
    """Cuts one stream of one process into lines.

    A carriage return goes back to the beginning of the line, so of each line only the last state counts. That keeps a
    progress bar, which is one line with thousands of states, as small as any line.
    """

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
        """The lines that this data completes; b"" is the end of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        state = _last_state(rest)
        if state and (not data or len(state) > MAX_LINE):
            lines.append(state)
            rest = b""
        elif b"\r" in rest:
            # A newline may follow that last one.
            rest = b"\r" + state + (b"\r" if rest.endswith(b"\r") else b"")
        self._rest = rest
        return [_text(_last_state(line)) for line in lines]

    @property
    def line(self) -> str:
        """The incomplete line as it looks now, without an incomplete last character."""
        return codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(_last_state(self._rest))

    @property
    def is_bar(self) -> bool:
        """Whether that line was overwritten, as progress bars are."""
        return b"\r" in self._rest


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


def cut(text: str, limit: int) -> str:
    """A text without its middle, if it is longer than `limit` characters."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


class Screen:
    """Chooses the texts to write so that a line of one writer never stands inside a line of another one.

    At most one line is incomplete at a time, the last one. If it is a bar, complete lines of others go above it, and
    other bars take its place, each for a while: two bars that end each other's lines would fill the screen. If it is
    none, another writer ends it by a newline. A bar that waits for its turn is shown when its line is complete.
    """

    def __init__(self) -> None:
        # The writer of the incomplete line, its stream, how the line looks, whether it is a bar, and since when.
        self._writer: Hashable = None
        self._stream = 0
        self._shown = ""
        self._is_bar = False
        self._since = 0.0

    def show(
        self, writer: Hashable, stream: int, line: str, now: float, *, complete: bool, is_bar: bool = False
    ) -> list[tuple[int, str]]:
        """The texts to write, each with its stream, when the current line of a writer looks like this."""
        written: list[tuple[int, str]] = []
        if writer != self._writer:
            if self._writer is not None and self._is_bar and complete:
                return [*self._clear(), (stream, f"{line}\n"), (self._stream, self._shown)]
            if self._writer is not None and self._is_bar and is_bar and now < self._since + _TURN:
                return []
            written = self.leave()
            self._writer, self._stream, self._shown, self._since = writer, stream, "", now
        change = line.removeprefix(self._shown)
        if len(change) == len(line) and self._shown:
            # Spaces hide the rest of a longer line.
            change = "\r" + line.ljust(len(self._shown))
        self._shown, self._is_bar = line, is_bar
        if complete:
            change += "\n"
            self._writer = None
        if change:
            written.append((stream, change))
        return written

    def leave(self) -> list[tuple[int, str]]:
        """The texts that end an incomplete line, because something else is written to the terminal."""
        if self._writer is None:
            return []
        self._writer = None
        return self._clear() if self._is_bar else [(self._stream, "\n")]

    def _clear(self) -> list[tuple[int, str]]:
        return [(self._stream, f"\r{' ' * len(self._shown)}\r")]
