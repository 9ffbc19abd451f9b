"""Kills processes that write the file of a coordinator, at random points, and looks at the files that they leave.

    python registry_writer.py FILE KILLS SEED

Prints the number of kills, of those in the middle of a commit, and of those that came before the file was open.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from aiodaft._protocol.coordination.records import Change, Kind, NamedActor, Record
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination.sqlite_store import RegistryFile

# Each commit moves the actor that has both names, so that names of two actors are a torn commit.
NAMES = ("left", "right")


def record(name: str, number: int) -> NamedActor:
    return NamedActor(name, PeerId("p"), ActorId(number), "x" * (number * 37 % 2000), ("C",), epoch=1, revision=number)


def number_in(records: tuple[Record, ...]) -> int:
    """The last commit that is in the file.

    Raises:
        ValueError: Only a part of it is.
    """
    numbers = {one.revision for one in records}
    if len(numbers) > 1 or len(records) not in {0, len(NAMES)}:
        raise ValueError(f"torn: {records}")
    return max(numbers, default=0)


def write(path: Path, acks: int) -> None:
    """Commit for ever; write the number of each commit, as 8 bytes, once it is stored."""
    file = RegistryFile(path)
    number = number_in(file.open().records)
    while True:
        number += 1
        file.commit([Change(number, Kind.NAME, name, record(name, number)) for name in NAMES])
        os.write(acks, number.to_bytes(8, "little"))


def kill_one(path: Path, rng: random.Random) -> tuple[int, int]:
    """Returns the last commit that was acknowledged, and the last that is in the file."""
    acks, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(acks)
        try:
            write(path, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    acked = 0
    for _ in range(rng.choice((0, 1, 5, 30, 300))):
        acked = int.from_bytes(os.read(acks, 8), "little")
    until = time.monotonic() + rng.random() * rng.choice((0.0002, 0.002, 0.02))
    while time.monotonic() < until:
        pass
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    while more := os.read(acks, 8):
        acked = int.from_bytes(more, "little")
    os.close(acks)
    file = RegistryFile(path)
    found = number_in(file.open().records)
    file.close()
    return acked, found


def main() -> None:
    path, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    last = within = before = 0
    for _ in range(kills):
        acked, found = kill_one(path, rng)
        assert max(acked, last) <= found <= max(acked, last) + 1, (acked, last, found)
        within += bool(acked) and found > acked
        before += not acked
        last = found
    print(kills, within, before)


if __name__ == "__main__":
    main()
