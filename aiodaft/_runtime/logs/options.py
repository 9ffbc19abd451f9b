"""The output and the log records of actors: `Runtime(logs=...)`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aiodaft._protocol.numbers import is_number


@dataclass(frozen=True, slots=True)
class Logs:
    """Options for the output and the log records of actors, which a runtime always shows.

    Args:
        folder: A folder for a file per actor, with the time before each line. It has the name of the actor, such as
            `Model-1.log`, or `Trainer-1.3.log` for rank 3; a restarted actor goes on writing to its file. The folder is
            on the machine of the program, also for actors on other machines.
        json: Whether each line that aiodaft writes, to the terminal and to these files, is a JSON object. Give
            `JsonFormatter` to handlers of your own, to have the same there.
        merge: Seconds that a line of a member of a group waits for the other ranks to write the same. Then it is shown
            once, with the ranks. 0 shows each line at once.

    Raises:
        ValueError: `merge` is negative, or no number.
    """

    folder: str | os.PathLike[str] | None = None
    json: bool = False
    merge: float = 0.2

    def __post_init__(self) -> None:
        if not is_number(self.merge):
            raise ValueError(f"merge={self.merge!r}: seconds are needed, or 0 to show each line at once")
