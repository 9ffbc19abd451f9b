"""Processes that are stopped for a while, and runtimes that notice it soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager

from clusters import Cluster, RunningNode

import aiodaft
from aiodaft._runtime.process import Env, Timeouts


def runtime_at(node: RunningNode, cluster: Cluster) -> aiodaft.Runtime:
    """A runtime that gives up a silent node within a second."""
    return aiodaft.Runtime(
        node.address, key_file=cluster.key_file, unhandled="log", env=Env(timeouts=Timeouts(silence=0.2))
    )


@contextmanager
def stopped(*pids: int) -> Generator[None]:
    """Processes that do nothing during the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
