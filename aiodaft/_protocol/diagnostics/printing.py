"""The output of many processes on one terminal: whole lines, and progress bars as they move. No I/O."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from aiodaft._protocol.numbers import Latest

_TURN: Final = 1.0
MAX_LINE: Final = 4 << 10


class Printed:
    """Cuts one stream of one process into lines.

    A carriage return goes back to the beginning of the line, so of each line only the last state counts. That keeps a
    progress bar, which is one line with thousands of states, as small as any line.
    """

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
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
        return codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(_last_state(self._rest))

    @property
    def is_bar(self) -> bool:
        return b"\r" in self._rest


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


def cut(text: str, limit: int) -> str:
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


class Screen:
    """Chooses the texts to write so that a line of one writer never stands inside a line of another one.

    At most the last line is incomplete. If it is a bar, complete lines of others go above it, and other bars take its
    place, each for a while: two bars that end each other's lines would fill the screen. If it is none, another writer
    ends it by a newline. A bar that waits for its turn is shown when its line is complete.
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
        if self._writer is None:
            return []
        self._writer = None
        return self._clear() if self._is_bar else [(self._stream, "\n")]

    def _clear(self) -> list[tuple[int, str]]:
        return [(self._stream, f"\r{' ' * len(self._shown)}\r")]


# Lines that several ranks of a group write at the same time, shown as one. No clock, no I/O.
#
# A line waits until all ranks have written it, or for a short time. Earlier lines of a rank, to the same stream, are
# shown first.

T = TypeVar("T")

_MAX_WAITING: Final = 256
_MEMBER: Final = re.compile(r"(?P<group>[^+]+)\[(?P<rank>\d+)\]")


class Member(NamedTuple):
    group: str
    rank: int


def member_of(name: str) -> Member | None:
    found = _MEMBER.fullmatch(name)
    return None if found is None else Member(found["group"], int(found["rank"]))


def ranks_text(ranks: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


class Merged(NamedTuple, Generic[T]):
    line: T
    group: str
    ranks: Sequence[int]


class _Waiting(NamedTuple, Generic[T]):
    key: Hashable
    line: T
    due: float
    ranks: list[int]


class Merging(Generic[T]):
    """The lines of groups that wait, at most `window` seconds for the other ranks, to be shown by `show`."""

    def __init__(self, window: float, show: Callable[[Merged[T]], object]) -> None:
        self._window = window
        self._show = show
        self._members: dict[str, set[int]] = {}
        self._waiting: dict[tuple[str, int], list[_Waiting[T]]] = {}

    def join(self, member: Member) -> None:
        self._members.setdefault(member.group, set()).add(member.rank)

    def leave(self, member: Member) -> None:
        ranks = self._members.get(member.group, set())
        ranks.discard(member.rank)
        if not ranks:
            self._members.pop(member.group, None)
            self.flush(member.group)

    def take(self, member: Member, stream: int, key: Hashable, line: T, now: float) -> None:
        group, rank = member
        waiting = self._waiting.setdefault((group, stream), [])
        same = next((one for one in waiting if one.key == key and rank not in one.ranks), None)
        if same is None:
            same = _Waiting(key, line, now + self._window, [])
            waiting.append(same)
        same.ranks.append(rank)
        if self._members.get(group, set()) <= {*same.ranks}:
            self._show_first((group, stream), waiting.index(same) + 1)
        elif len(waiting) > _MAX_WAITING:
            self._show_first((group, stream), len(waiting))

    def _show_first(self, lane: tuple[str, int], count: int) -> None:
        waiting = self._waiting[lane]
        shown, waiting[:] = waiting[:count], waiting[count:]
        if not waiting:
            del self._waiting[lane]
        for one in shown:
            self._show(Merged(one.line, lane[0], sorted(one.ranks)))

    def flush(self, group: str | None = None) -> None:
        for lane, waiting in list(self._waiting.items()):
            if group in {None, lane[0]}:
                self._show_first(lane, len(waiting))

    def get_timer(self) -> float | None:
        return min((waiting[0].due for waiting in self._waiting.values()), default=None)

    def handle_timer(self, now: float) -> None:
        for lane, waiting in list(self._waiting.items()):
            over = sum(one.due <= now for one in waiting)
            if over:
                self._show_first(lane, over)


# Log records inside the standard error of a process, so that they stay in order with its other output. A record is a
# JSON object in one or more frames, which are lines that begin with a control character:
#
#     \x1e PID NUMBER INDEX/COUNT PART \n
#
# Each frame is written at once: the kernel writes up to PIPE_BUF bytes in one piece or not at all, so frames of several
# threads and forked processes do not mix, and the output of a process that dies is whole. A frame may stand behind an
# incomplete line, such as a progress bar, which goes on after it.

_MARK: Final = b"\x1e"
# PIPE_BUF on Linux, and the room for the header.
_MAX_FRAME: Final = 4096
_MAX_PART: Final = _MAX_FRAME - 64
_FRAME: Final = re.compile(rb"\x1e(\d{1,10}) (\d{1,18}) (\d{1,4})/(\d{1,4}) ([^\x1e\n]*)\n")
_MAX_WRITERS: Final = 64

Record: TypeAlias = Mapping[str, Any]


def frames_of(record: Record, pid: int, number: int) -> list[bytes]:
    # JSON escapes control characters.
    data = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    parts = [data[start : start + _MAX_PART] for start in range(0, len(data), _MAX_PART)]
    return [b"\x1e%d %d %d/%d %s\n" % (pid, number, index, len(parts), part) for index, part in enumerate(parts, 1)]


class Sieve:
    def __init__(self) -> None:
        self._rest = b""
        self._parts = Latest[int, tuple[int, list[bytes]]](_MAX_WRITERS)

    def take(self, data: bytes) -> Iterator[bytes | Record]:
        stream, self._rest = self._rest + data, b""
        printed = at = 0
        while (at := stream.find(_MARK, at)) >= 0:
            found = _FRAME.match(stream, at)
            if found is None:
                if data and len(stream) - at < _MAX_FRAME and stream.find(b"\n", at) < 0:
                    self._rest = stream[at:]
                    stream = stream[:at]
                # Otherwise a program has printed the character.
                at += 1
                continue
            if at > printed:
                yield stream[printed:at]
            printed = at = found.end()
            record = self._assemble(found)
            if record is not None:
                yield record
        if len(stream) > printed:
            yield stream[printed:]

    def _assemble(self, frame: re.Match[bytes]) -> Record | None:
        """A record with a missing frame is dropped; its process says so in its next record."""
        pid, number, index, count = (int(frame[group]) for group in (1, 2, 3, 4))
        known, parts = self._parts.pop(pid, (number, []))
        if known != number:
            parts = []
        if index != len(parts) + 1:
            return None
        parts.append(frame[5])
        if index < count:
            self._parts[pid] = number, parts
            return None
        try:
            record = json.loads(b"".join(parts))
        except ValueError:
            return None
        return cast("Record", record) if isinstance(record, dict) else None
