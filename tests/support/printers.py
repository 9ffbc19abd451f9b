"""Actors that print and log."""

from __future__ import annotations

import logging
import os
import signal
import sys

from aiodaft import Actor, method


class Printer(Actor):
    """Does on its thread what programs do in a terminal."""

    def _bar(self, last: int) -> None:
        for step in range(last + 1):
            sys.stderr.write(f"\rstep {step}")
            sys.stderr.flush()

    @method
    def progress(self, first_gate: str, second_gate: str) -> None:
        """Shows a bar, and then part of a line, each until the test writes to a fifo."""
        self._bar(9)
        os.close(os.open(first_gate, os.O_RDONLY))
        sys.stderr.write("\n")
        print("part 1...", end="", flush=True)
        os.close(os.open(second_gate, os.O_RDONLY))
        print("part 2")

    @method
    def die_with_a_bar(self) -> None:
        print("loading", file=sys.stderr)
        self._bar(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    def log(self, *levels: int) -> None:
        for level in levels:
            logging.getLogger("users.module").log(level, "level %d", level)

    @method
    def configure_logging(self) -> None:
        logging.basicConfig(level=logging.DEBUG, format="as the actor likes it: %(message)s")
