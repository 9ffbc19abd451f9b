"""The process in each bundle of a Ray placement group: an actor of Ray that has a node as its child."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Final

from aiodaft._protocol.connections.address import Address, parse_address

# Seconds that a node has to end.
_PATIENCE: Final = 15.0


class RayHost:
    """The node of one bundle. It ends with this process, because it reads the end of a pipe then."""

    def __init__(self) -> None:
        self._node: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], key: bytes) -> str:
        """Start a node with these arguments of `aiodaft`. Returns its address.

        Raises:
            RuntimeError: It ended. Its messages are on the standard error of this process, which Ray shows.
        """
        listen = str(Address(import_module("ray").util.get_node_ip_address(), 0))
        command = [sys.executable, "-m", "aiodaft.cli", *arguments, "--listen", listen, "--key-stdin"]
        node = self._node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert node.stdin is not None
        assert node.stdout is not None
        # One that has ended says more by its exit status.
        with suppress(BrokenPipeError):
            node.stdin.write(key)
            node.stdin.flush()
        line = node.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError(f"the node did not come up: it ended with status {node.wait(_PATIENCE)}")
        threading.Thread(target=_show, args=(node.stdout,), daemon=True).start()
        return str(parse_address(line))

    def end(self) -> None:
        if self._node is not None and self._node.stdin is not None:
            with suppress(BrokenPipeError):
                self._node.stdin.close()
            try:
                self._node.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._node.kill()


def _show(printed: IO[bytes]) -> None:
    """Pass on the output of actors; Ray shows it where the program runs."""
    for line in printed:
        print(line.decode(errors="replace"), end="", flush=True)
