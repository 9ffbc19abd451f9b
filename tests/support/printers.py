"""Actors that print and log."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

from aiodaft import Actor, method

logger = logging.getLogger("users.module")


class _Unhappy:
    def __del__(self) -> None:
        raise ValueError("in __del__")


class Printer(Actor):
    """Prints on its thread as programs do in a terminal."""

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
    def say(self, *lines: str) -> None:
        for line in lines:
            print(line)

    @method
    def warn(self, line: str) -> None:
        """Prints to standard error, where log records go too, and waits until there is room."""
        print(line, file=sys.stderr, flush=True)

    # Logs.

    @method
    def log(self, *levels: int) -> None:
        for level in levels:
            logger.log(level, "level %d", level)

    @method
    async def log_from_the_loop(self, text: str, **extra: Any) -> None:
        logger.warning("%s", text, extra=extra)

    @method
    def log_an_error(self) -> None:
        try:
            _ = [][1]
        except IndexError:
            logger.exception("the requested item is not there")

    @method
    def log_in_a_child(self) -> None:
        child = os.fork()
        if child == 0:
            logger.warning("said by a forked child")
            os._exit(0)
        os.waitpid(child, 0)

    @method
    def log_and_die(self) -> None:
        print("printed last", file=sys.stderr)
        logger.error("logged last")
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    def go_wrong_unseen(self) -> None:
        """Warns, and raises where no code catches it."""
        warnings.warn("an odd thing", stacklevel=1)
        _Unhappy()
        gc.collect()
        thread = threading.Thread(target=lambda: [][1], name="worker")
        thread.start()
        thread.join()

    @method
    def effective_level(self, name: str) -> int:
        return logging.getLogger(name).getEffectiveLevel()

    @method
    def configure_logging(self) -> None:
        logging.basicConfig(level=logging.DEBUG, format="as the actor likes it: %(message)s")

    @method
    def log_by_the_module(self, text: str) -> None:
        logging.warning(text)

    @method
    def log_to_a_file_too(self, path: str) -> None:
        logging.getLogger().addHandler(logging.FileHandler(path))

    @method
    def flood(self, count: int) -> None:
        for number in range(count):
            logger.warning("line %d", number)
