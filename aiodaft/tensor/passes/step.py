"""An instruction with the operation of the program that it comes from."""

from __future__ import annotations

from typing import NamedTuple

from aiodaft.tensor.instructions import Instruction
from aiodaft.tensor.operations import Cause

__all__ = ["Step"]


class Step(NamedTuple):
    """A step of a plan that is being made."""

    instruction: Instruction
    cause: Cause
