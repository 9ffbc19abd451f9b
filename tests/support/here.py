"""The parts of the process that runs a test's code, for tests that look inside."""

from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process


def current_peer() -> Peer:
    return current_process().part(Peer)
