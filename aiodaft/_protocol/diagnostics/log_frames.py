"""Log records inside the standard error of a process, so that they stay in order with its other output. No I/O.

A record is a JSON object in one or more frames, which are lines that begin with a control character:

    \\x1e PID NUMBER INDEX/COUNT PART \\n

Each frame is written at once. The kernel writes up to PIPE_BUF bytes in one piece or not at all, so frames of several
threads and forked processes do not mix, and the output of a process that dies is whole. A frame may stand behind an
incomplete line, such as a progress bar, which goes on after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias, cast

from aiodaft._protocol.numbers import Latest

_MARK: Final = b"\x1e"
# PIPE_BUF on Linux, and the room for the header.
_MAX_FRAME: Final = 4096
_MAX_PART: Final = _MAX_FRAME - 64
_FRAME: Final = re.compile(rb"\x1e(\d{1,10}) (\d{1,18}) (\d{1,4})/(\d{1,4}) ([^\x1e\n]*)\n")
# The processes of which parts are kept at a time: an actor, and the children that it has forked.
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
        # Of each process: the number of the record that comes in parts, and these.
        self._parts = Latest[int, tuple[int, list[bytes]]](_MAX_WRITERS)

    def take(self, data: bytes) -> Iterator[bytes | Record]:
        """The output and the records, in order; b"" is the end of the stream."""
        stream, self._rest = self._rest + data, b""
        # `printed` is where the text begins that is not yielded yet.
        printed = at = 0
        while (at := stream.find(_MARK, at)) >= 0:
            found = _FRAME.match(stream, at)
            if found is None:
                if data and len(stream) - at < _MAX_FRAME and stream.find(b"\n", at) < 0:
                    # The rest of the frame is still to come.
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
        """The record that a frame completes.

        One with a missing frame is dropped; its process says so in its next record.
        """
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
