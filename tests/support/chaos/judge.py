"""The promises that a chaos run checks (docs/promises.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from aiodaft.exceptions import CallCancelled, DaftError, DeadlineExceeded, NotDelivered, OutcomeUnknown

from .deeds import MAY_FAIL, WrongValue
from .plan import ACTORS, Deed, Op

__all__ = ["Hang", "judge"]

# Operations of one call: their error is that of the call.
_SINGLE: Final = frozenset({Deed.CALL, Deed.WORK, Deed.TIMEOUT, Deed.CANCEL, Deed.DEADLINE})


class Hang(AssertionError):
    """An operation that did not end."""


def judge(op: Op, error: BaseException | None, ran: Counter[int], *, hurt: bool) -> Iterator[str]:
    """The promises that an operation shows to be broken.

    Args:
        op: The operation.
        error: Its error, if it has failed.
        ran: The number of times that each call ran.
        hurt: Whether an actor was killed or stopped meanwhile.
    """
    what = f"operation {op.id} ({op.deed.value}, {op.size})"
    mine = {number: ran[number] for number in range(op.id, op.id + ACTORS)}
    if any(times > 1 for times in mine.values()):
        yield f"{what}: a call ran more than once: {mine}"
    if error is None:
        if not mine[op.id]:
            yield f"{what}: it gave a value, and did not run"
        return
    if isinstance(error, WrongValue | Hang):
        yield f"{what}: {error}"
    elif isinstance(error, OutcomeUnknown | NotDelivered) and not hurt:
        yield f"{what}: nothing was harmed, and it failed: {error!r}"
    elif isinstance(error, OSError) and not (hurt or isinstance(error, TimeoutError)):
        yield f"{what}: nothing was harmed, and the system refused something: {error!r}"
    elif isinstance(error, TimeoutError | CallCancelled | DeadlineExceeded) and not hurt and op.deed not in MAY_FAIL:
        yield f"{what}: it was not given up, and it ended: {error!r}"
    elif isinstance(error, DaftError) and error.executed is False and op.deed in _SINGLE and mine[op.id]:
        yield f"{what}: the error says that it did not run, and it did: {error!r}"
