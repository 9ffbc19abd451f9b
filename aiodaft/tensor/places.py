"""Places in the user's code."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Final, TypeAlias

import torch

__all__ = ["Place", "here", "line_of", "said"]

# The name of an operation, and where it was recorded: a code object, and an instruction of it.
Place: TypeAlias = tuple[str, CodeType, int]

# Frames of these are no lines of the user.
_INSIDE: Final = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__))


def said(place: Place) -> str:
    """`aten.mm.default at train.py:12`"""
    name, code, instruction = place
    return f"{name} at {line_of(code, instruction)}"


def line_of(code: CodeType, instruction: int) -> str:
    """`train.py:12`"""
    lines = [line for first, end, line in code.co_lines() if first <= instruction < end and line is not None]
    return f"{Path(code.co_filename).name}:{lines[0] if lines else '?'}"


def here() -> tuple[CodeType, int]:
    """The place in the user's code."""
    frame = sys._getframe(2)
    while _is_inside(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


@cache
def _is_inside(file: str) -> bool:
    return file.startswith(_INSIDE)
