"""The parts of the process that runs a test's code, for tests that look inside."""

from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process


def current_peer() -> Peer:
    return current_process().part(Peer)


def copied_bytes() -> int:
    """Bytes of the copies that this process has of values for other processes."""
    entries = current_peer().store.entries.values()
    return sum(stored.block.nbytes for stored in entries if stored.block is not None)
