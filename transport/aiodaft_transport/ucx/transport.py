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

from aiodaft_transport.abc import size_of
from aiodaft_transport.exceptions import GrantError, PeerGone, TransportError, Unreachable
from aiodaft_transport.memory.address import check_target, exposed_view
from aiodaft_transport.memory.grants import segment_of
from aiodaft_transport.memory.host_pool import DEFAULT_KEEP, Arena, ArenaBlock
from aiodaft_transport.memory.registered import Regions
from aiodaft_transport.ucx.progress import Driver
from aiodaft_transport.ucx.pull import Pull, Remote, RemoteSegment
from aiodaft_transport.ucx.registered_memory import WORD, Pool, Stamp
from aiodaft_transport.ucx.shm_folder import folder
from aiodaft_transport.ucx.ucp import Library, UcxError

if TYPE_CHECKING:
    from aiodaft_transport.abc import Block, Control, Grant, Host
    from aiodaft_transport.memory.registered import AnyBlock

_ADDRESS: Final = 1  # address and value of the sender's stamp, size of its key; the key, and the worker's address
_SEGMENT: Final = 2  # id, address, size, key: a segment
_GONE: Final = 3  # id: a segment was closed
_RETURN: Final = 4  # id: a grant is returned
_KIND: Final = struct.Struct("<B8s")  # kind, and a digest of the rest: UCX does not check what it unpacks
_HEAD: Final = struct.Struct("<QQQ")
_NUMBER: Final = struct.Struct("<Q")

# Shared memory that a worker needs while it starts, with a reserve. UCX 1.22 takes 17 MiB and keeps 4. With less it
# uses no shared memory, and with 16 MiB it aborts the process.
_SHARED_MEMORY: Final = 20 << 20

INTERFACE_VARIABLE: Final = "AIODAFT_UCX_INTERFACE"
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
        # Unlink files in shared memory at once.
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
        turn_seconds: Seconds that UCX works before the rest of the loop has its turn.
        folder: Makes the folder for files in shared memory, with room for the given number of bytes.
    """

    local: str = _LOCAL
    turn_seconds: float = 0.001
    folder: Callable[[int], AbstractContextManager[str]] = folder


class UcxTransport:
    """Transfers by remote memory access."""

    name: ClassVar[str] = "ucx"
    shared: ClassVar[bool] = False

    def __init__(
        self,
        host: Host,
        library: Library,
        *,
        local: str,
        interface: str | None = None,
        keep: int = DEFAULT_KEEP,
        settings: UcxSettings | None = None,
    ) -> None:
        self._host = host
        self._library = library
        self._local = local
        self._settings = settings or UcxSettings()
        self._options = options_for(interface or os.environ.get(INTERFACE_VARIABLE) or None, self._settings.local)
        self._blocks = Pool(keep=keep, on_segment_closed=self._block_segment_closed)
        self._landing = Pool(keep=keep)
        # Memory of users. Peers know it and the segments by numbers, so both share one sequence.
        self._regions = Regions(self._blocks.arena.next_number, self._blocks.closed)
        self._stamps = Pool(keep=keep)
        self._driver: Driver | None = None
        self._remotes: dict[str, Remote] = {}
        self._last_grant = 0
        self._closed = False

    @property
    def arena(self) -> Arena:
        """The pool that blocks come from."""
        return self._blocks.arena

    @property
    def landing(self) -> Arena:
        """The pool that values arrive in."""
        return self._landing.arena

    @property
    def registrations(self) -> int:
        """The number of registrations so far: segments of the pools, and memory of users."""
        return sum(pool.registrations for pool in (self._blocks, self._landing, self._stamps))

    @property
    def driver(self) -> Driver:
        """The driver of UCX; started when first needed, because it belongs to the running loop."""
        if self._driver is None:
            if self._closed:
                raise TransportError("the transport is closed")
            # The driver makes all its files now; peers open them through /proc.
            with self._settings.folder(_SHARED_MEMORY) as path:
                options = {**self._options, "POSIX_DIR": path}
                self._driver = Driver(self._library, options, self._settings.turn_seconds)
        return self._driver

    def allocate(self, nbytes: int) -> Block:
        return self._blocks.arena.allocate(nbytes)

    def grant(self, block: Block, control: Control) -> Grant:
        block = cast("AnyBlock", block)
        segment, remote = block.segment, self._remote(control)
        block.take_grant()
        self._last_grant += 1
        number = self._last_grant
        # Before the notes: if the connection breaks while they are sent, `peer_lost` has to find the grant.
        remote.granted[number] = block
        try:
            self._introduce(remote)
            if segment.id not in remote.told:
                key = self._blocks.key_of(segment, self.driver.worker)
                self._send(remote, _SEGMENT, _HEAD.pack(segment.id, segment.address, segment.size) + key)
                remote.told.add(segment.id)
        except BaseException:
            self._take_back(remote, number)
            raise
        return (segment.id, block.offset, block.nbytes, number)

    def revoke(self, grant: Grant, control: Control) -> None:
        remote = self._remotes.get(control.peer)
        if remote is not None:
            self._take_back(remote, cast(int, grant[3]))

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
        try:
            check_target(target, size_of(grant))
        except ValueError:
            self.decline(grant, control)
            raise
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

    def decline(self, grant: Grant, control: Control) -> None:
        remote = self._remotes.get(control.peer)
        if remote is not None:
            self._send(remote, _RETURN, _NUMBER.pack(cast(int, grant[3])))

    def register(self, address: int, nbytes: int) -> None:
        self._regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        self._regions.remove(address)

    def block_at(self, memory: memoryview) -> Block | None:
        return self._regions.find(memory)

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)
        if self._closed:
            return
        kind, body = _opened(control.peer, note)
        remote = self._remote(control)
        if kind == _ADDRESS and not remote.address and len(body) > _HEAD.size:
            self._connect(remote, body)
        elif kind == _SEGMENT and remote.address and len(body) > _HEAD.size:
            number, address, size = _HEAD.unpack_from(body)
            if number in remote.segments:
                raise GrantError(f"{control.peer} announced segment {number} twice")
            remote.segments[number] = RemoteSegment(address, size, body[_HEAD.size :])
        elif kind == _GONE and len(body) == _NUMBER.size:
            self._forget(remote, _NUMBER.unpack(body)[0])
        elif kind == _RETURN and len(body) == _NUMBER.size:
            self._take_back(remote, _NUMBER.unpack(body)[0])
        else:
            raise GrantError(f"{control.peer} sent an invalid note")

    def peer_lost(self, peer: str) -> None:
        remote = self._remotes.pop(peer, None)
        if remote is None:
            return
        # Before any block granted to the peer is reused.
        remote.stamp.expire()
        remote.lost = f"{peer} is gone"
        remote.cut(remote.lost)
        self._free_keys(remote)
        granted, remote.granted = remote.granted, {}
        for block in granted.values():
            block.return_grant()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._remotes):
            self.peer_lost(peer)
        if self._driver is not None:
            self._driver.close()
        for pool in (self._blocks, self._landing, self._stamps):
            pool.arena.close()

    def _remote(self, control: Control) -> Remote:
        remote = self._remotes.get(control.peer)
        if remote is None:
            if self._closed:
                raise TransportError("the transport is closed")
            remote = self._remotes[control.peer] = Remote(control, Stamp(self._stamps))
        return remote

    def _send(self, remote: Remote, kind: int, body: bytes) -> None:
        remote.control.send_note(self.name, _KIND.pack(kind, _digest(body)) + body)

    def _introduce(self, remote: Remote) -> None:
        if not remote.introduced:
            worker = self.driver.worker
            # Before the note: a process may be its own peer, and notes to itself arrive at once.
            remote.introduced = True
            key = self._stamps.key_of(remote.stamp.block.segment, worker)
            head = _HEAD.pack(remote.stamp.address, remote.stamp.value, len(key))
            self._send(remote, _ADDRESS, head + key + worker.address)

    def _connect(self, remote: Remote, body: bytes) -> None:
        address, remote.expected_stamp, size = _HEAD.unpack_from(body)
        end = _HEAD.size + size
        remote.stamped = RemoteSegment(address, WORD, body[_HEAD.size : end])
        remote.address = body[end:]
        # Both sides connect, so that each can disconnect; UCX merges both into one connection. If the peer is dead, or
        # this process has no memory for UCX, the note is still valid, and the next transfer fails.
        with suppress(OSError):
            with suppress(UcxError):
                self._reach(remote)
            self._introduce(remote)

    def _reach(self, remote: Remote) -> None:
        """Make an endpoint to a peer if there is none."""
        if remote.endpoint is None:
            remote.endpoint = self.driver.connect(remote.address, lambda status: self._broke(remote, status))

    def _broke(self, remote: Remote, status: int) -> None:
        """UCX reports a failed endpoint. The peer may live: the next transfer makes a new endpoint."""
        remote.cut(f"UCX lost {remote.control.peer}: {self._library.text(status)}")
        self._free_keys(remote)

    def _pull(self, grant: Grant, control: Control, target: memoryview | None) -> Pull:
        """Begin a fetch, into the pool if there is no target. A small fetch may be over when this returns."""
        _, offset, nbytes, grant_id = cast(tuple[int, int, int, int], grant)
        remote, segment = self.source_of(grant, control)
        try:
            driver = self.driver
            self._introduce(remote)
            self._reach(remote)
            landing: AnyBlock
            if target is None:
                landing = self._landing.arena.allocate(nbytes)
                memory = self.landing_memory(landing)
            else:
                landing = self._regions.find_or_make(target)
                memory = self._blocks.memory_of(landing.segment, driver.worker)
            pull = Pull(remote, driver, landing, lambda: self._pulled(remote, grant_id))
            stamp_memory = self._stamps.memory_of(remote.stamp.block.segment, driver.worker)
        except BaseException:
            self.decline(grant, control)
            raise
        pull.begin(segment, offset, memory, stamp_memory)
        driver.turn()
        return pull

    def source_of(self, grant: Grant, control: Control) -> tuple[Remote, RemoteSegment]:
        """The segment with the granted bytes.

        Raises:
            GrantError: There is no such segment.
            PeerGone: The peer is gone.
        """
        remote = self._remotes.get(control.peer)
        if remote is not None and remote.lost is not None:
            self.decline(grant, control)
            raise PeerGone(remote.lost)
        segment = segment_of(grant, control, {} if remote is None else remote.segments)
        # A peer without a `Remote` has no segments.
        assert remote is not None
        return remote, segment

    def landing_memory(self, landing: ArenaBlock) -> int:
        """The memory handle of a block to fetch into."""
        return self._landing.memory_of(landing.segment, self.driver.worker)

    def _pulled(self, remote: Remote, grant_id: int) -> None:
        """A transfer is over: return its grant."""
        if self._remotes.get(remote.control.peer) is remote:
            self._send(remote, _RETURN, _NUMBER.pack(grant_id))
        self._free_keys(remote)

    def _forget(self, remote: Remote, number: int) -> None:
        segment = remote.segments.get(number)
        if segment is None or segment.users:
            raise GrantError(f"{remote.control.peer} closed segment {number}, which it does not have or still lends")
        del remote.segments[number]
        if segment.rkey is not None:
            self.driver.worker.forget(segment.rkey)

    def _free_keys(self, remote: Remote) -> None:
        """Free the keys of closed endpoints once no transfer uses them."""
        if remote.pulls:
            return
        retired, remote.retired = remote.retired, []
        for rkey in retired:
            self.driver.worker.forget(rkey)
        if remote.lost is not None:
            remote.stamp.block.release()

    @staticmethod
    def _take_back(remote: Remote, number: int) -> None:
        block = remote.granted.pop(number, None)
        if block is not None:
            block.return_grant()

    def _block_segment_closed(self, segment_id: int) -> None:
        # The arena calls this in any thread; connections belong to the loop.
        self._host.call_soon(lambda: self._tell_gone(segment_id))

    def _tell_gone(self, segment_id: int) -> None:
        for remote in self._remotes.values():
            if segment_id in remote.told:
                remote.told.discard(segment_id)
                self._send(remote, _GONE, _NUMBER.pack(segment_id))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()


def _opened(peer: str, note: bytes) -> tuple[int, bytes]:
    if len(note) < _KIND.size:
        raise GrantError(f"{peer} sent a note that is too short")
    kind, digest = _KIND.unpack_from(note)
    body = note[_KIND.size :]
    if digest != _digest(body):
        raise GrantError(f"{peer} sent a note that is damaged")
    return kind, body
