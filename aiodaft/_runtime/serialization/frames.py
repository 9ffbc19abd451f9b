"""The frames of a traceback as plain data, and a traceback made of them that shows the same lines.

Tracebacks, debuggers and notebooks find the source of a frame by its file, the first line of its code and the position
in it. Each frame that is made has these, and no variables.
"""

from __future__ import annotations

import ast
from collections.abc import Generator
from functools import lru_cache
from itertools import islice
from types import CodeType, TracebackType
from typing import Final, NamedTuple

# The column of an instruction that has none.
_NOWHERE: Final = -1
# The name of the only variable of a frame: Python, which looks for names like an unknown one, finds none like this.
_STOP: Final = "..."


class FrameData(NamedTuple):
    """One frame, and the position in its code."""

    file: str
    function: str
    module: str
    first_line: int
    line: int
    end_line: int
    column: int
    end_column: int


class _Raised(Exception):
    """Ends the code of a frame."""


def frames_of(entry: TracebackType | None) -> list[FrameData]:
    found: list[FrameData] = []
    while entry is not None:
        code, line = entry.tb_frame.f_code, entry.tb_lineno or 0
        module, first = str(entry.tb_frame.f_globals.get("__name__")), min(code.co_firstlineno, line)
        ends = _ends(code, entry.tb_lasti, line)
        found.append(FrameData(code.co_filename, code.co_name, module, first, line, *ends))
        entry = entry.tb_next
    return found


def _ends(code: CodeType, instruction: int, line: int) -> tuple[int, int, int]:
    """The last line of the expression, and its columns."""
    start, end, column, end_column = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if start != line or end is None or column is None or end_column is None:
        return line, _NOWHERE, _NOWHERE
    return end, column, end_column


def gap(left_out: int) -> FrameData:
    """A frame in the place of others."""
    return FrameData("...", f"<{left_out} frames left out>", "", 0, 0, 0, _NOWHERE, _NOWHERE)


def traceback_of(frames: list[FrameData]) -> TracebackType | None:
    # The caller of a generator is forgotten. Else the frames would lead to the receiver of the error: a cycle.
    return next(_made_of(frames))


def _made_of(frames: list[FrameData]) -> Generator[TracebackType | None]:
    made: TracebackType | None = None
    entry: TracebackType | None = None
    try:
        for frame in reversed(frames):
            try:
                exec(_code(frame), {"__name__": frame.module, _STOP: _Raised})
            except _Raised as raised:
                entry = raised.__traceback__
            # The first entry is that of this function.
            assert entry is not None
            assert entry.tb_next is not None
            entry.tb_next.tb_next = made
            made = entry.tb_next
        yield made
    finally:
        # The frames that are made refer to this one: break the circle.
        del made, entry


@lru_cache(256)
def _code(frame: FrameData) -> CodeType:
    # Code counts its lines from the first.
    lines = frame.line - frame.first_line + 1, frame.end_line - frame.first_line + 1
    at = {"lineno": lines[0], "end_lineno": lines[1], "col_offset": frame.column, "end_col_offset": frame.end_column}
    statement = ast.Raise(exc=ast.Name(_STOP, ast.Load(), **at), cause=None, **at)
    code = compile(ast.Module([statement], []), frame.file, "exec")
    return code.replace(co_name=frame.function, co_firstlineno=frame.first_line)
