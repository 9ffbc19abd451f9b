"""A strategy: how a program is distributed, as data beside it."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.tensor.placement_types import Placement

from aiodaft.pipeline import Kind, Schedule, Task
from aiodaft.tensor.specs import text, untext

Patterns: TypeAlias = Mapping[str, Mapping[str, Placement]]
"""A pattern of names, such as `blocks.*.up.weight`, and the placement by axis; the first pattern that fits a name wins.
A `*` stands for any text, dots included."""

Implicit: TypeAlias = Literal["allow", "warn", "error"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The placements of a program's tensors. Names that no pattern fits have replicas on all ranks, and so have tensors
    without dimensions.

    Attributes:
        params: Of parameters, by their names in the model; their gradients arrive likewise.
        inputs: Of the arguments of the function, by their names in its signature.
        outputs: Of what modules give, by the paths of modules; their gradients are placed likewise.
        optimizer: Of the optimizer's state, by the names of its parameters; those which no pattern fits are placed as
            the parameter. The parameter is updated in these parts (`{"*": {"dp": Shard(0)}}` is ZeRO-1).
        use: Of parameters while they are computed with, by name (`{"*": {}}`, with parts in `params`, is ZeRO-3: each
            is gathered before its module and again in backward). Those which no pattern fits are used as they are.
        recompute: Patterns of paths of modules of which backward computes the inside again, in place of keeping it.
        stages: Paths of modules after which the program is cut into the stages of a pipeline, on the axis `pp`.
        schedule: The name of the pipeline's schedule, a function of `aiodaft.pipeline`, or the tasks of each rank.
        microbatches: The number of parts, along their first dimension, into which the arguments are cut; gradients are
            accumulated over them, and divided by their number.
        implicit: Whether collectives that no entry of the strategy asks for are allowed, logged or errors.
    """

    params: Patterns = field(default_factory=dict)
    inputs: Patterns = field(default_factory=dict)
    outputs: Patterns = field(default_factory=dict)
    optimizer: Patterns = field(default_factory=dict)
    use: Patterns = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    schedule: str | Schedule = "one_f_one_b"
    microbatches: int = 1
    implicit: Implicit = "allow"

    def __post_init__(self) -> None:
        for name in ("params", "inputs", "outputs", "optimizer", "use"):
            for pattern, given in getattr(self, name).items():
                if not isinstance(given, Mapping) or not all(isinstance(one, Placement) for one in given.values()):
                    raise TypeError(
                        f"{name}[{pattern!r}] is {given!r}: give the placement of each axis, such as {{'tp': Shard(0)}}"
                    )
        for name in ("recompute", "stages"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise TypeError(f"{name} is {given!r}: give a tuple of paths of modules")
            object.__setattr__(self, name, tuple(given))
        if not isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", tuple(map(tuple, self.schedule)))
        if self.implicit not in get_args(Implicit):
            raise ValueError(f"implicit is {self.implicit!r}: give one of {', '.join(get_args(Implicit))}")
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches!r}: give a number of at least 1")

    def to_json(self) -> str:
        """The strategy as JSON; placements are written `S(0)`, `R`, `P(sum)`, tasks of a schedule `F0.2`, with stage
        and micro-batch. Defaults are left out."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        default = Strategy()
        return json.dumps(
            {name: _plain(value) for name, value in given.items() if value != getattr(default, name)}, indent=2
        )

    @classmethod
    def from_json(cls, written: str) -> Strategy:
        """The strategy that `to_json` wrote.

        Raises:
            ValueError: It is no JSON, has an unknown field, or a placement cannot be read.
        """
        given = json.loads(written)
        if not isinstance(given, dict):
            raise ValueError(f"a strategy is an object of JSON with {', '.join(one.name for one in fields(cls))}")
        if unknown := given.keys() - {one.name for one in fields(cls)}:
            raise ValueError(f"a strategy has no {', '.join(sorted(unknown))}")
        return cls(**{name: _placements(name, value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return [" ".join(f"{one.kind.name}{one.stage}.{one.microbatch}" for one in row) for row in value]
    return text(value) if isinstance(value, Placement) else value


def _placements(name: str, value: Any) -> Any:
    if name in ("recompute", "stages"):
        return tuple(value)
    if name == "schedule" and not isinstance(value, str):
        return [[_task(one) for one in row.split()] for row in value]
    if not isinstance(value, dict):
        return value
    try:
        return {pattern: {axis: untext(one) for axis, one in given.items()} for pattern, given in value.items()}
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _task(written: str) -> Task:
    try:
        stage, microbatch = map(int, written[1:].split("."))
        return Task(stage, microbatch, Kind[written[0]])
    except (KeyError, ValueError):
        raise ValueError(
            f"schedule: {written!r} is no task: write F0.2, B0.2 or W0.2 of stage 0, micro-batch 2"
        ) from None


def first(patterns: Patterns, name: str) -> Mapping[str, Placement] | None:
    for pattern, given in patterns.items():
        if fnmatch.fnmatchcase(name, pattern):
            return given
    return None


def matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(kind: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"{kind}: no name fits {pattern!r}; the nearest are {nearest(pattern, known)}")


def nearest(word: str, known: list[str]) -> str:
    return ", ".join(difflib.get_close_matches(word, known, 3, 0.4) or known[:3]) or "none at all"
