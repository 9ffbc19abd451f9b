"""UCX: the consumer pulls from the producer's registered memory into its own, by remote memory access.

Addresses and keys of memory travel as notes over the connection, so strangers cannot get them. On one host UCX listens
on no port; across hosts, only on the named interface. The connection shows whether a peer lives, not UCX.

An operation owns its buffers until UCX reports that it is complete. A cancelled fetch begins no more pieces; when the
last piece under way has completed, the memory is reused and the grant is returned.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, cast

from aiodaft_transport.abc import GONE, NOTE, RETURN, SEGMENT, SegmentTransport, size_of
from aiodaft_transport.exceptions import GrantError, TransportError, Unreachable
from aiodaft_transport.memory import (
    ArenaBlock,
    Block,
    LentBlock,
    LoanedBlock,
    Region,
    Regions,
    Segment,
    check_target,
    exposed_view,
)
from aiodaft_transport.system import folder
from aiodaft_transport.ucx import INTERFACE_VARIABLE
from aiodaft_transport.ucx.pull import WORD, Driver, Pool, Pull, Remote, RemoteSegment, Stamp
from aiodaft_transport.ucx.ucp import UcxError, load

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control, Grant, Host

# A further note: the value of the sender's stamp, the size of its key; its address, the key and the worker's address.
# The body of SEGMENT is the address and the key. Each note ends with a digest: UCX does not check what it unpacks.
_ADDRESS: Final = 4
_WHERE: Final = struct.Struct("<Q")
_DIGEST_SIZE: Final = 8

# Shared memory that a worker needs while it starts, with a reserve. UCX 1.22 takes 17 MiB and keeps 4. With less it
# uses no shared memory, and with 16 MiB it aborts the process.
_SHARED_MEMORY: Final = 20 << 20

# On one host: wake-ups and control messages through shared memory, payload by process_vm_readv. No port.
_LOCAL: Final = "posix,cma,self"
_REMOTE: Final = "rc,ud,dc,tcp"


def options_for(interface: str | None, local: str = _LOCAL) -> dict[str, str]:
    """The configuration of UCX; it overrides the environment.

    Args:
        interface: The network device to other hosts, such as "eth0" or "mlx5_0:1"; None for this host only.
        local: The UCX transports between processes of this host.

    Raises:
        Unreachable: There is no such device.
    """
    options = {
        "TLS": local,
        # Allow shared memory with error handling of peers.
        "MM_ERROR_HANDLING": "y",
        "POSIX_USE_PROC_LINK": "y",
        # Else UCX prefers a rendezvous protocol that cannot use process_vm_readv.
        "RNDV_THRESH": "inf",
        # The connection shows whether a peer lives; keepalives would only wake idle processes.
        "KEEPALIVE_INTERVAL": "inf",
    }
    if interface is None:
        return options
    if not interface or "," in interface or interface in ("all", "*"):
        raise ValueError(f"a transport uses one named interface, never {interface or 'an empty name'!r}")
    devices = [path.name for kind in ("net", "infiniband") for path in Path("/sys/class", kind).glob("*")]
    if interface.partition(":")[0] not in devices:
        raise Unreachable(f"transport 'ucx' cannot use {interface!r}: the interfaces are {', '.join(sorted(devices))}")
    return {**options, "TLS": f"{local},{_REMOTE}", "NET_DEVICES": interface}


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """Settings that tests change.

    Attributes:
        local: The UCX transports between processes of this host; with "self" they use the network.
        turn_seconds: UCX works so long before the rest of the loop has its turn.
        folder: Makes the folder for files in shared memory, with room for the given number of bytes.
    """

    local: str = _LOCAL
    turn_seconds: float = 0.001
    folder: Callable[[int], AbstractContextManager[str]] = folder


class UcxTransport(SegmentTransport[Block, Remote]):
    name: ClassVar[str] = "ucx"

    def __init__(self, host: Host, *, interface: str | None = None, settings: UcxSettings | None = None) -> None:
        super().__init__(host)
        self._library = load()
        self._settings = settings or UcxSettings()
        self._options = options_for(interface or os.environ.get(INTERFACE_VARIABLE) or None, self._settings.local)
        self.arena = Pool(self._segment_closed)
        self.landing = Pool()
        self._stamps = Pool()
        # Peers know memory of users and the segments by numbers, so both share one sequence.
        self._regions = Regions(self.arena.next_number, self.arena.closed)
        self._driver: Driver | None = None

    @property
    def registrations(self) -> int:
        """Segments of the pools, and memory of users."""
        return sum(pool.registrations for pool in self.pools())

    @property
    def driver(self) -> Driver:
        """Started when first needed, because it belongs to the running loop."""
        if self._driver is None:
            if self._closed:
                raise TransportError("the transport is closed")
            # The driver makes all its files now; peers open them through /proc.
            with self._settings.folder(_SHARED_MEMORY) as path:
                options = {**self._options, "POSIX_DIR": path}
                self._driver = Driver(self._library, options, self._settings.turn_seconds)
        return self._driver

    def pools(self) -> Sequence[Pool]:
        return self.arena, self.landing, self._stamps

    def allocate(self, nbytes: int) -> ArenaBlock:
        return self.arena.allocate(nbytes)

    def adopt(self, block: Block) -> Block:
        if isinstance(block, LentBlock) or self.arena.owns(block):
            return block
        segment = block.segment
        region = segment.kept.get(self.name)
        if not isinstance(region, Region):
            region = Region(self.arena.next_number(), segment.address, segment.size, self.arena.closed)
            segment.kept[self.name] = region
        return LoanedBlock(region, block)

    async def fetch(self, grant: Grant, control: Control) -> memoryview:
        pull = self._pull(grant, control, None)
        try:
            await pull.done
        except BaseException:
            pull.detach()
            raise
        landing = cast(ArenaBlock, pull.landing)
        return exposed_view(landing.segment.region, landing.offset, landing.nbytes, landing.release)

    async def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> None:
        with self._declining(grant, control, ValueError):
            check_target(target, size_of(grant))
        pull = self._pull(grant, control, target)
        try:
            await pull.done
        except BaseException:
            pull.detach()
            await pull.wait_over()
            raise
        finally:
            # The traceback of the error refers to this frame, and must not keep the memory registered.
            del pull

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lose_all()
        if self._driver is not None:
            self._driver.close()
        for pool in self.pools():
            pool.close()

    def _meet(self, control: Control) -> Remote:
        return Remote(control, Stamp(self._stamps))

    def _send(
        self, remote: Remote, kind: int, number: int, size: int = 0, body: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        super()._send(remote, kind, number, size, body + _digest(kind, number, size, body), fds)

    def _tell(self, segment: Segment | Region, remote: Remote) -> None:
        self._introduce(remote)
        key = self.arena.key_of(segment, self.driver.worker)
        self._send(remote, SEGMENT, segment.id, segment.size, _WHERE.pack(segment.address) + key)

    def _introduce(self, remote: Remote) -> None:
        if not remote.introduced:
            worker, stamp = self.driver.worker, remote.stamp
            # Before the note: a process may be its own peer, and notes to itself arrive at once.
            remote.introduced = True
            key = self._stamps.key_of(stamp.block.segment, worker)
            body = _WHERE.pack(stamp.address) + key + worker.address
            self._send(remote, _ADDRESS, stamp.value, len(key), body)

    def _noted(self, remote: Remote, kind: int, number: int, size: int, body: bytes, fds: list[int]) -> bool:
        body, digest = body[:-_DIGEST_SIZE], body[-_DIGEST_SIZE:]
        if digest != _digest(kind, number, size, body):
            raise GrantError(f"{remote.control.peer} sent a note that is damaged")
        where, rest = body[: _WHERE.size], body[_WHERE.size :]
        if kind == _ADDRESS and not remote.address and len(rest) > size:
            self._connect(remote, RemoteSegment(_WHERE.unpack(where)[0], WORD, rest[:size]), number, rest[size:])
        elif kind == SEGMENT and remote.address and rest and number not in remote.segments:
            remote.segments[number] = RemoteSegment(_WHERE.unpack(where)[0], size, rest)
        elif kind == GONE and number in remote.segments and not remote.segments[number].users:
            rkey = remote.segments.pop(number).rkey
            if rkey is not None:
                self.driver.worker.forget(rkey)
        else:
            return kind == RETURN and remote.take_back(number)
        return True

    def _connect(self, remote: Remote, stamped: RemoteSegment, expected_stamp: int, address: bytes) -> None:
        remote.stamped, remote.expected_stamp, remote.address = stamped, expected_stamp, address
        # Both sides connect, so that each can disconnect; UCX merges both into one connection. If the peer is dead, or
        # this process has no memory for UCX, the note is still valid, and the next transfer fails.
        with suppress(OSError):
            with suppress(UcxError):
                self._reach(remote)
            self._introduce(remote)

    def _reach(self, remote: Remote) -> None:
        if remote.endpoint is None:
            remote.endpoint = self.driver.connect(remote.address, lambda status: self._broke(remote, status))

    def _broke(self, remote: Remote, status: int) -> None:
        """The peer may live: the next transfer makes a new endpoint."""
        remote.cut(self.driver, f"UCX lost {remote.control.peer}: {self._library.text(status)}")
        self._free_keys(remote)

    def _part(self, remote: Remote) -> None:
        # Before any block granted to the peer is reused.
        remote.stamp.expire()
        remote.lost = True
        if self._driver is not None:
            remote.cut(self._driver, f"{remote.control.peer} is gone")
        self._free_keys(remote)

    def _pull(self, grant: Grant, control: Control, target: memoryview | None) -> Pull:
        """A small fetch may be over when this returns."""
        _, offset, nbytes, number = cast(tuple[int, int, int, int], grant)
        remote, segment = self.source_of(grant, control)
        with self._declining(grant, control):
            driver = self.driver
            self._introduce(remote)
            self._reach(remote)
            landing: Block
            if target is None:
                landing = self.landing.allocate(nbytes)
                memory = self.landing.memory_of(landing.segment, driver.worker)
            else:
                assert self._regions is not None
                landing = self._regions.find_or_make(target)
                memory = self.arena.memory_of(landing.segment, driver.worker)
            pull = Pull(remote, driver, landing, lambda: self._pulled(remote, number))
            stamp_memory = self._stamps.memory_of(remote.stamp.block.segment, driver.worker)
        pull.begin(segment, offset, memory, stamp_memory)
        driver.turn()
        return pull

    def _pulled(self, remote: Remote, number: int) -> None:
        self._send(remote, RETURN, number)
        self._free_keys(remote)

    def _free_keys(self, remote: Remote) -> None:
        if remote.pulls:
            return
        retired, remote.retired = remote.retired, []
        for rkey in retired:
            self.driver.worker.forget(rkey)
        if remote.lost:
            remote.stamp.block.release()


def _digest(kind: int, number: int, size: int, body: bytes) -> bytes:
    return hashlib.blake2b(NOTE.pack(kind, number, size) + body, digest_size=_DIGEST_SIZE).digest()
