"""The meeting of the tasks of a job: rank 0 writes its address, and the key, to a file on a shared folder.

Only its user can read the file, and readers refuse one that another user could have read or made. It is whole as soon
as it has its name, and is there only until all tasks have come.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.dialing import TcpNetwork
from aiodaft._runtime.connections.far import who_listens
from aiodaft._runtime.connections.identity import Identity, read_private, write_private
from aiodaft.exceptions import DaftError, LaunchFailed
from aiodaft_transport import TransportError

# Seconds between two looks: at first, and at most.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0


@contextmanager
def published(path: Path, address: str, identity: Identity) -> Generator[None]:
    """Have the file there for the time of the block, in place of one that an earlier run of the job has left.

    Raises:
        KeyFileError: It cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")
    write_private(new, f"{address}\n".encode() + identity.packed())
    os.replace(new, path)
    try:
        yield
    finally:
        # A task of a later run may have replaced it.
        with suppress(OSError):
            path.unlink()


async def meet(path: Path, local: PeerId, patience: float) -> tuple[str, Identity]:
    """Wait until rank 0 has written the file, and answers. Returns its address, and the key.

    Raises:
        LaunchFailed: It did not within `patience` seconds.
    """
    pause, why = _FIRST_PAUSE, "it has written no file"
    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                try:
                    first, _, key = read_private(path).partition(b"\n")
                    found = str(parse_address(first.decode("ascii", errors="replace"))), Identity(key)
                    await who_listens(TcpNetwork(found[1]), local, found[0])
                    return found
                except (DaftError, TransportError, OSError, ValueError) as error:
                    # Also the file of an earlier run, which is replaced.
                    why = str(error)
                # No signal tells this machine of another one's writes to a shared folder.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    raise LaunchFailed(
        f"rank 0 did not answer within {patience:g} s ({path}): {why}; --shared names a folder that all machines see"
    )
