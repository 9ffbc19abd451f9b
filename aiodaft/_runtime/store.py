"""Values that this process keeps for others, and the memory they are in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import INLINE_LIMIT
from aiodaft.ref import Borrowed, Ref
from aiodaft_transport import Block, Grant, Transport
from aiodaft_transport.memory import view_at

from .decoding import decode, is_heavy
from .offload import SYNC_COPY, Offload
from .pickling import TooLong
from .serialization import Names, encode
from .values import Encoded, Source

if TYPE_CHECKING:
    from .link import Neighbour

Key: TypeAlias = tuple[PeerId, CallId]


class Arrived:  # noqa: B903 - on the path of every call: a dataclass costs more
    """A value as it came: not decoded yet."""

    __slots__ = ("blobs", "inline", "origin", "payload", "refs")

    def __init__(self, payload: bytes, inline: bytes | None, blobs: list[memoryview], refs: list[Ref[Any]]) -> None:
        self.payload = payload
        self.inline = inline
        self.blobs = blobs
        self.refs = refs
        # Where the value was made in this very process: gives the objects its buffers came from.
        self.origin: Callable[[int], Any] = _no_origin


class Kept:
    """An encoded value that peers may pull: small ones are bytes, large ones lie in blocks."""

    __slots__ = (
        "_lender",
        "_packed",
        "_released",
        "_transport",
        "_versions",
        "block",
        "encoded",
        "inline",
        "lent",
        "on_release",
        "origins",
        "root",
        "via",
    )

    def __init__(self, encoded: Encoded, lender: Borrowed[Any] | None = None, via: str | None = None) -> None:
        if lender is not None:
            for source in encoded.sources:
                source.lent = True
        self.encoded = encoded
        self.inline: bytes | None = None
        self.block: Block | None = None
        self.origins = [source.origin for source in encoded.sources]
        self.lent = encoded.lent
        # What the buffers looked like when the value was given to us.
        self._versions = encoded.versions()
        self._lender = lender
        # Name of the transport that was asked for.
        self.via = via
        # For a copy that is kept for others: the process that made the value.
        self.root: PeerId | None = None
        self.on_release: Callable[[], object] | None = None
        self._transport: Transport | None = None
        self._packed = False
        self._released = False

    @classmethod
    def again(cls, arrived: Arrived) -> Kept:
        """A small value that came, to be passed on as it is."""
        kept = cls(Encoded(arrived.payload, refs=arrived.refs))
        kept.inline = arrived.inline
        kept._packed = True
        return kept

    @classmethod
    def copy_of(cls, arrived: Arrived, via: str, root: PeerId) -> Kept:
        """A large value that came, to be copied for others before anybody here changes it."""
        (blob,) = arrived.blobs
        kept = cls(Encoded(arrived.payload, [Source.of(blob)], [0], blob.nbytes, refs=arrived.refs), via=via)
        kept.root = root
        # What others make of it did not come from objects of this process.
        kept.origins = []
        return kept

    @property
    def payload(self) -> bytes:
        """The skeleton."""
        return self.encoded.payload

    @property
    def refs(self) -> list[Ref[Any]]:
        """The refs that travel inside."""
        return self.encoded.refs

    @property
    def all_blocks(self) -> list[Block]:
        """Where the buffers are, once they are packed."""
        return [*([] if self.block is None else [self.block]), *self.encoded.blocks]

    @property
    def is_inline(self) -> bool:
        """Whether it travels inside a message."""
        return not self.encoded.blocks and self.encoded.size <= INLINE_LIMIT

    @property
    def ready(self) -> bool:
        """Whether it may be granted without copying anything first."""
        return self._packed

    def can_be_relayed(self, smallest: int) -> bool:
        """Whether it may go from consumer to consumer: one blob of some size, whose bytes are really sent."""
        if self.root is not None or self._transport is None or self._transport.shared:
            return False
        blocks = self.all_blocks
        return len(blocks) == 1 and blocks[0].nbytes >= smallest

    def pack(self, transport: Transport) -> None:
        """Copy the buffers to where peers can reach them. May take long.

        Raises:
            BorrowError: A tensor was written to meanwhile, or since it was lent.
        """
        if self._packed:
            return
        self._transport = transport
        encoded = self.encoded
        encoded.check_unchanged(self._versions)
        if self.is_inline:
            self.inline = encoded.packed()
        elif encoded.nbytes:
            block = transport.allocate(encoded.nbytes)
            # Without a view, closing the transport would unmap what this thread still writes to.
            view = block.view
            try:
                encoded.write_to(block.address)
                # Written to in between, what was copied is torn.
                encoded.check_unchanged(self._versions)
            except BaseException:
                block.release()
                raise
            finally:
                del view
            self.block = block
            if self._released:
                # Nobody wants it any more; whoever gave it up did not see the block yet.
                block.release()
        self._packed = True
        for source in encoded.sources:
            if not source.lent:
                # The copy is made: what it was made from is not ours to keep.
                source.keep = source.fill = source.version = None

    def blobs_for(self, link: Neighbour) -> bytes | tuple[tuple[str, Grant], ...] | None:
        """What the message to a peer says about the buffers; grants it the blocks.

        Raises:
            BorrowError: A lent buffer was written to.
        """
        if self.lent:
            self.encoded.check_unchanged(self._versions)
        transport = self._transport
        if transport is None or not self.all_blocks:
            return self.inline
        blocks = self.all_blocks
        link.traffic.payloads_sent += len(blocks)
        link.traffic.payload_sent += sum(block.nbytes for block in blocks)
        return tuple((transport.name, transport.grant(block, link)) for block in blocks)

    def origin(self, index: int) -> Any:
        """The object that buffer `index` came from, if it still is what it was."""
        find = self.origins[index] if self.origins else None
        return None if find is None else find()

    def release(self) -> None:
        """Nobody will ask for it again: its memory is reused once the last reader is done. Idempotent."""
        if self._released:
            return
        self._released = True
        if self.block is not None:
            self.block.release()
        if self.on_release is not None:
            self.on_release()
        if self._lender is not None:
            self.when_unread(self._lender.mark_released)

    def when_unread(self, callback: Callable[[], object]) -> None:
        """Call back once no peer reads the buffers."""
        waiting = [block for block in self.all_blocks if block.grants]
        if not waiting:
            callback()
        else:
            waiting[0].on_unread(lambda: self.when_unread(callback))


class Store:
    """The values of one process."""

    def __init__(self, home: Any, offload: Offload, open_transport: Callable[[str], Transport], transport: str) -> None:
        self._home = home
        self._offload = offload
        self._open_transport = open_transport
        self._transports: dict[str, Transport] = {}
        self._preferred = transport
        # Memory of tensors by its address: made by `empty()`; and bytes of what the user registered.
        self._shared: dict[int, Block] = {}
        self._registered: dict[int, int] = {}
        self.entries: dict[Key, Kept] = {}

    @property
    def transport(self) -> Transport:
        """How payloads leave this process."""
        return self.transport_named(self._preferred)

    def transport_named(self, name: str) -> Transport:
        """The transport with this name, opened when first needed."""
        if name not in self._transports:
            transport = self._transports[name] = self._open_transport(name)
            for address, nbytes in list(self._registered.items()):
                transport.register(address, nbytes)
        return self._transports[name]

    def keep(
        self,
        value: Any,
        names: Names,
        *,
        via: str | None = None,
        lender: Borrowed[Any] | None = None,
        resolve: bool = False,
        patient: bool = False,
    ) -> Kept:
        """Encode a value; see `serialization.encode`. Safe in any thread."""

        def find_block(source: Source) -> Block | None:
            return self._find_block(source, via or self._preferred)

        encoded = encode(value, names=names, find_block=find_block, resolve=resolve, patient=patient)
        return Kept(encoded, lender, via)

    def _find_block(self, source: Source, name: str) -> Block | None:
        """The block that a tensor's memory is, if the transport reads it where it lies."""
        shared = self._shared.get(source.address) if name == self._preferred else None
        if shared is not None or not self._registered or source.nbytes <= INLINE_LIMIT:
            # Small ones travel better together.
            return shared
        return self.transport_named(name).block_at(view_at(source.address, source.nbytes, source.keep))

    async def keep_anywhere(
        self,
        value: Any,
        names: Names,
        *,
        via: str | None = None,
        lender: Borrowed[Any] | None = None,
        resolve: bool = False,
    ) -> Kept:
        """Encode a value here if that is quick, else in the helper thread."""
        keep = partial(self.keep, value, names, via=via, lender=lender, resolve=resolve)
        try:
            return keep()
        except TooLong:
            return await self._offload.run(partial(keep, patient=True))

    def pack_now(self, kept: Kept) -> bool:
        """Make a value ready if that takes no time worth mentioning; False if it does."""
        if kept.ready:
            return True
        if kept.encoded.nbytes > SYNC_COPY:
            return False
        self.pack_here(kept)
        return True

    def pack_here(self, kept: Kept) -> None:
        """Make a value ready in this thread, however long that takes."""
        kept.pack(self.transport_named(kept.via or self._preferred))

    async def pack(self, kept: Kept) -> None:
        """Make a value ready, in the helper thread if it is large."""
        if not self.pack_now(kept):
            await self._offload.run(lambda: self.pack_here(kept))

    def keep_patiently(self, result: Any, label: str, via: str | None) -> Kept:
        """In a thread that may take its time: encode a result, and copy its buffers to where peers can reach them."""
        lender = result if isinstance(result, Borrowed) else None
        value = result if lender is None else lender.value
        kept = self.keep(value, Names(label, (("result", value),)), via=via, lender=lender, patient=True)
        if not kept.lent:
            self.pack_here(kept)
        return kept

    async def decode(self, arrived: Arrived, slots: list[Any] | None = None, refs: list[Any] | None = None) -> Any:
        """Decode a value here if that is quick, else in the helper thread."""
        if is_heavy(arrived.payload):
            return await self._offload.run(lambda: self.decode_now(arrived, slots, refs, patient=True))
        return self.decode_now(arrived, slots, refs)

    def decode_now(
        self, arrived: Arrived, slots: list[Any] | None = None, refs: list[Any] | None = None, *, patient: bool = False
    ) -> Any:
        """Decode a value in this thread."""
        blobs = arrived.blobs if arrived.inline is None else [memoryview(bytearray(arrived.inline))]
        return decode(
            arrived.payload,
            blobs,
            slots=slots or (),
            refs=refs or (),
            origin=arrived.origin,
            patient=patient,
            home=self._home,
        )

    def drop(self, key: Key) -> None:
        """Free a value that its owner does not need any more."""
        kept = self.entries.pop(key, None)
        if kept is not None:
            kept.release()

    def stored_bytes(self) -> int:
        """Bytes of values kept for their owners."""
        return sum(kept.encoded.size for kept in self.entries.values())

    def relayed_bytes(self) -> int:
        """Bytes of copies that are kept for other consumers."""
        return sum(kept.encoded.size for kept in self.entries.values() if kept.root is not None)

    def drop_relayed(self, key: Key, root: PeerId) -> None:
        """Free the copy of a value that its producer has freed."""
        kept = self.entries.get(key)
        if kept is not None and kept.root == root:
            self.drop(key)

    def process_lost(self, remote: PeerId) -> None:
        """Free every value of an owner that is gone, and every copy of a value that was made there."""
        for key in [key for key, kept in self.entries.items() if remote in (key[0], kept.root)]:
            self.drop(key)

    def share(self, address: int, block: Block) -> None:
        """Remember that a tensor made by `empty()` begins at an address."""
        self._shared[address] = block

    def unshare(self, address: int) -> None:
        """The tensor is gone: its block is reused once nobody reads it."""
        self._shared.pop(address).release()

    def register(self, address: int, nbytes: int) -> None:
        """Prepare every transport, also those that are opened later, for memory of the user's. Safe in any thread.

        Raises:
            ValueError: Part of it is registered.
        """
        if any(start < address + nbytes and address < start + size for start, size in list(self._registered.items())):
            raise ValueError("the memory, or part of it, is registered already")
        self._registered[address] = nbytes
        for transport in list(self._transports.values()):
            transport.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """The opposite. Safe in any thread, also while garbage is collected."""
        del self._registered[address]
        for transport in list(self._transports.values()):
            transport.unregister(address)

    def peer_lost(self, peer: PeerId) -> None:
        """Forget a peer's grants and mappings."""
        for transport in self._transports.values():
            transport.peer_lost(peer)

    def close(self) -> None:
        """Free everything."""
        for key in list(self.entries):
            self.drop(key)
        for transport in self._transports.values():
            transport.close()


def _no_origin(index: int) -> Any:
    return None
