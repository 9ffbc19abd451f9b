"""Failures of actors: the records of them in a process, and the failures that led to others. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from aiodaft._protocol.numbers import Latest
from aiodaft.causes import chain_of, message_of

_REMEMBERED: Final = 64
_MAX_MESSAGE: Final = 1 << 10
_MAX_PATH: Final = 16
_RAISED_BY: Final = "raised by "
# The user looks for no line of the runtime's own code.
_OWN_CODE: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

Kind: TypeAlias = Literal["call", "death", "start", "node", "limit"]


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception that led to a failure.

    Attributes:
        type: Its class, such as "ValueError".
        message: Its text, at most 1,024 characters.
        path: The calls that raised it or passed it on, such as "Model.step in Model-1 (pid 7, host)"; the first one
            raised it. Empty if no call did.
    """

    type: str
    message: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that failed, once or several times in the same way.

    Attributes:
        what: "call": a method raised. "death": a process ended by accident. "start": an actor could not be made.
            "node": a node was lost. "limit": an actor died more often than its restart policy allows.
        actor: The actor; of a death all actors of the process; of a node its name.
        method: The method, such as "Model.step"; "" if it was no call.
        process: The id of the process that failed.
        pid: Its pid; None if it had not started.
        line: The line that raised the first cause, such as "model.py:12 in step"; "" if that is not known.
        causes: The chain of exceptions: the root cause first, the callers' error last.
        times: The number of failures of this kind.
        first: The time of the first failure, in seconds since the epoch.
        last: The time of the last one.
        followed: The failures that came of this one, oldest first.
    """

    what: Kind
    actor: str
    method: str
    process: str
    pid: int | None
    line: str
    causes: tuple[Cause, ...]
    times: int
    first: float
    last: float
    followed: tuple[Failure, ...] = ()

    @property
    def error(self) -> str:
        return str(self.causes[0])


class Subject(NamedTuple):
    what: Kind
    actor: str
    method: str
    process: str
    pid: int | None


class FailureLog:
    """The last different failures of one process. It keeps texts, no exceptions: these would keep frames.

    Attributes:
        deaths: The number of processes that ended by accident, by the class of their first actor.
    """

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self._kept = Latest[tuple[Subject, tuple[Cause, ...]], Failure](_REMEMBERED)

    def note(self, subject: Subject, error: BaseException, now: float) -> None:
        if subject.what == "death":
            self.deaths[subject.actor.partition("-")[0]] += 1
        key = subject, causes_of(error)
        known = self._kept.pop(key, None)
        if known is None:
            self._kept[key] = Failure(*subject, line_of(error), key[1], 1, now, now)
        else:
            self._kept[key] = replace(known, times=known.times + 1, last=now)

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._kept.values())


def raised_by(where: str) -> str:
    return _RAISED_BY + where


def causes_of(error: BaseException) -> tuple[Cause, ...]:
    return tuple(
        Cause(type(one).__name__, message_of(one, _MAX_MESSAGE), _path_of(one)) for one in reversed(chain_of(error))
    )


def line_of(error: BaseException) -> str:
    line, frames = "", chain_of(error)[-1].__traceback__
    while frames is not None:
        code = frames.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_CODE):
            line = f"{os.path.basename(code.co_filename)}:{frames.tb_lineno} in {code.co_name}"
        frames = frames.tb_next
    return line


def _path_of(error: BaseException) -> tuple[str, ...]:
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return tuple(note.removeprefix(_RAISED_BY) for note in notes if note.startswith(_RAISED_BY))[:_MAX_PATH]


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures of several processes as trees: those that no other one led to, the newest first.

    A failure led to another one if its exception is in the chain of that, after the same calls and before others. Of
    several such failures, the one whose exception has come furthest did.
    """
    # Each comes behind all that may have led to it.
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: (_depth(failure), failure.first)):
        alike.setdefault((failure.causes[0].type, failure.causes[0].message), []).append(failure)
    trees = [tree for group in alike.values() for tree in _trees(group)]
    return tuple(sorted(trees, key=lambda failure: failure.last, reverse=True))


def _trees(alike: Sequence[Failure]) -> list[Failure]:
    roots: list[int] = []
    followed: list[list[int]] = [[] for _ in alike]
    for index, failure in enumerate(alike):
        cause = next((step for step in reversed(range(index)) if _led_to(alike[step], failure)), None)
        (roots if cause is None else followed[cause]).append(index)

    def tree(index: int) -> Failure:
        return replace(alike[index], followed=tuple(map(tree, followed[index])))

    return list(map(tree, roots))


def _depth(failure: Failure) -> tuple[int, int]:
    return len(failure.causes), len(failure.causes[-1].path)


def _led_to(first: Failure, second: Failure) -> bool:
    *earlier, last = first.causes
    same = second.causes[len(earlier)]
    return (
        _depth(first) < _depth(second)
        and tuple(earlier) == second.causes[: len(earlier)]
        and (last.type, last.message) == (same.type, same.message)
        and last.path == same.path[: len(last.path)]
    )


# Each error takes some 10 kB, and a server meets any number of them.
LIMIT: Final = 100


class Unhandled:
    def __init__(self) -> None:
        self._kept: list[BaseException] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, error: BaseException) -> bool:
        if any(error is known for known in self._kept):
            return False
        self._count += 1
        if len(self._kept) >= LIMIT:
            return False
        self._kept.append(error)
        return True

    def group(self, body: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """None if the block raises its body's error, or none at all."""
        others = [error for error in self._kept if error is not body]
        if not others:
            return None
        left_out = self._count - len(self._kept)
        what = "errors in a scope" + (f" ({left_out} more were only counted)" if left_out else "")
        return BaseExceptionGroup(what, others if body is None else [body, *others])
