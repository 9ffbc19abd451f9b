"""Moves tensors by a plan of `_protocol.groups.reshard`: an actor in every process.

    controller -- receive --> destination -- write, cut --> source
                              (each rank)                   (its shard)

A source that can map the memory of the new shard is asked to write its pieces into place: each byte is copied once. Any
other source is asked for parcels: pieces of tensors, one after the other, as bytes. It cuts a parcel when it is asked,
and frees it when the destination has it; neither has more on the way than the plan allows. A parcel comes as the result
of `cut`, like any other value: without a copy if it is one piece without gaps of a shard that is lent.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.connections.messages import INLINE_LIMIT
from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.groups.reshard import Piece, by_source, filtered, nbytes_in
from aiodaft._protocol.ids import RESHARDING, ActorId, PeerId
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget, TargetBeside
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import InPlace, Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.threads import SYNC_COPY, wait_passed
from aiodaft._runtime.serialization.encoded import is_dense_tensor
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor, Handle
from aiodaft.exceptions import DaftError
from aiodaft.methods import method
from aiodaft.reading import borrow
from aiodaft.ref import Ref
from aiodaft_transport import Grant

if TYPE_CHECKING:
    import torch


# Name, dtype and shape of a tensor of a shard.
Expected: TypeAlias = tuple[str, str, tuple[int, ...]]


def check_shard(shard: object, rank: int, expected: Sequence[Expected]) -> None:
    """Raises TypeError: it is no dict of plain tensors. ValueError: names, shapes or dtypes differ from the layout."""
    of = f"the shard of rank {rank} of the source"
    if not isinstance(shard, Mapping):
        raise TypeError(f"{of} is {type(shard).__name__}, and a dict of tensors is expected")
    for name, dtype, shape in expected:
        if name not in shard:
            raise ValueError(f"{of} has no {name!r}; its layout expects torch.{dtype} of shape {tuple(shape)}")
        tensor = shard[name]
        if not is_dense_tensor(tensor):
            raise TypeError(f"{name!r} in {of} is {type(tensor).__name__}, and a plain tensor is expected")
        if str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name!r} in {of} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"its layout expects torch.{dtype} of shape {tuple(shape)}"
            )
    surplus = shard.keys() - {name for name, _, _ in expected}
    if surplus:
        raise ValueError(f"{of} has {min(map(repr, surplus))}, which its layout does not expect there")


def _slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def target_part(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return tensors[piece.name][_slices(piece.target_start, piece.size)]


def source_part(shard: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return shard[piece.name].detach()[_slices(piece.source_start, piece.size)]


def shaped(flat: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    import torch  # noqa: PLC0415 - optional package

    kind: torch.dtype = getattr(torch, dtype)
    return flat.view(kind).view(tuple(shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as bytes."""
    import torch  # noqa: PLC0415 - optional package

    return tensor.view(-1).view(torch.uint8)


def pack(flat: torch.Tensor, shard: Mapping[str, torch.Tensor], pieces: Sequence[Piece]) -> None:
    at = 0
    for piece in pieces:
        given = source_part(shard, piece)
        flat[at : at + piece.nbytes].view(given.dtype).view(given.shape).copy_(given)
        at += piece.nbytes


def unpack(tensors: Mapping[str, torch.Tensor], flat: torch.Tensor, pieces: Sequence[Piece]) -> None:
    at = 0
    for piece in pieces:
        place = target_part(tensors, piece)
        place.copy_(flat[at : at + piece.nbytes].view(place.dtype).view(place.shape))
        at += piece.nbytes


def copy_pieces(
    tensors: Mapping[str, torch.Tensor], shard: Mapping[str, torch.Tensor], pieces: Sequence[Piece]
) -> None:
    for piece in pieces:
        target_part(tensors, piece).copy_(source_part(shard, piece))


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# The memory of a tensor in another process, with its dtype and shape.
Memory: TypeAlias = tuple[Grant, str, tuple[int, ...]]


class Source(NamedTuple):
    peer: PeerId
    label: str
    shard: Ref[Mapping[str, torch.Tensor]]
    # It is being made by another move.
    pending: bool = False


class Opened(NamedTuple):
    """The tensors of a shard of this process, and the writes to each until then, as torch counts them."""

    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[str, int | None]

    def are_unchanged(self, pieces: Iterable[Piece]) -> bool:
        return all(version_of(self.tensors[piece.name]) == self.versions[piece.name] for piece in pieces)


class Transit:
    """Bytes of this process that are on the way."""

    def __init__(self) -> None:
        self.now = 0
        # The most that there were at a time.
        self.most = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


class Room:
    """Bytes on the way in one direction. Transfers beyond its size wait."""

    def __init__(self, transit: Transit) -> None:
        self._transit = transit
        self._used = 0
        self._freed = asyncio.Event()

    async def take(self, nbytes: int, bound: int) -> None:
        """Wait until there is room below the bound; something larger than that waits until there is nothing else."""
        while self._used and self._used + nbytes > bound:
            self._freed.clear()
            await self._freed.wait()
        self._used += nbytes
        self._transit.add(nbytes)

    def give_back(self, nbytes: int, _: object = None) -> None:
        self._used -= nbytes
        self._transit.add(-nbytes)
        self._freed.set()


class Resharding(Actor):
    """Cuts the shards of this process, and puts together new ones."""

    def __init__(self, caller: Caller, store: Store) -> None:
        self._caller = caller
        self._process = caller.process
        self._store = store
        self.transit = Transit()
        # The bytes that were cut here and have not arrived.
        self.cut_room = Room(self.transit)
        # The shards that lie here: a parcel has a few tensors, and opening a shard takes a look at all of them.
        self._opened: WeakKeyDictionary[StoredValue, Opened] = WeakKeyDictionary()

    # The source.

    @method(ordered=False)
    async def check(self, shard: Opaque, rank: int, expected: Sequence[Expected]) -> None:
        """Compare a shard, of which this gets the ref, with its layout; see `check_shard`."""
        ref = shard.content
        stored = self._stored(ref)
        if stored is not None and stored.in_host_memory:
            with stored.in_place() as received:
                check_shard(await self._store.decode(received), rank, expected)
        else:
            # A ref of this process need not be known to others.
            check_shard(await (ref if state_of(ref).own else self._bring(ref)), rank, expected)

    @method(ordered=False)
    async def write(
        self, shard: Opaque, parcels: Sequence[Sequence[tuple[Any, ...]]], places: Mapping[str, Memory], target: PeerId
    ) -> None:
        """Write pieces of a shard, of which this gets the ref, to the places of their tensors in another process."""
        route = self._caller.connections.route_to(target)
        tensors = {
            name: shaped(self._store.place(grant, route), dtype, shape)
            for name, (grant, dtype, shape) in places.items()
        }
        pieces = [[Piece(*fields) for fields in parcel] for parcel in parcels]
        await self.read(shard.content, pieces, partial(copy_pieces, tensors))
        await self._settle(shard.content)
        route.traffic.payloads_sent += 1
        route.traffic.payload_sent += nbytes_in(pieces)

    @method(ordered=False)
    async def cut(self, shard: Opaque, parcel: Sequence[tuple[Any, ...]], bound: int, target: PeerId) -> torch.Tensor:
        """Return pieces of a shard, of which this gets the ref, as bytes. Waits while `bound` bytes are on the way."""
        pieces = [Piece(*fields) for fields in parcel]
        lent = await self._lend(shard.content, pieces, target)
        if lent is not None:
            # As with `borrow`, the caller gets a tensor.
            return cast("torch.Tensor", lent)
        nbytes = nbytes_in([pieces])
        await self.cut_room.take(nbytes, bound)
        try:
            flat = self.allocate((nbytes,), "uint8")
        except BaseException:
            self.cut_room.give_back(nbytes)
            raise
        # With the last user of its memory; any thread may run this.
        freed = partial(self._process.call_soon, partial(self.cut_room.give_back, nbytes))
        weakref.finalize(flat.untyped_storage(), freed).atexit = False
        await self.read(shard.content, [pieces], partial(pack, flat))
        return flat

    @method(ordered=False)
    async def check_unchanged(self, shard: Opaque) -> None:
        """Check a shard after its last parcel has arrived.

        Raises:
            BorrowError: It was lent, and has been written to.
        """
        await self._settle(shard.content)

    # The destination.

    @method(ordered=False)
    async def receive(
        self,
        new: Sequence[Expected],
        kept: Sequence[Sequence[tuple[Any, ...]]],
        parcels: Sequence[Sequence[tuple[Any, ...]]],
        bound: int,
        sources: Opaque,
    ) -> dict[str, torch.Tensor]:
        """Put a shard together.

        Args:
            parcels: The pieces of other processes, in messages.
            bound: The bytes that may be on the way to here.

        Raises:
            DaftError: A source is lost, or its shard.
        """
        ranks = cast("Mapping[int, Source]", sources.content)
        for source in ranks.values():
            if source.pending:
                await source.shard.ready()
        tensors = {name: self.allocate(shape, dtype) for name, dtype, shape in new}
        for parcel in kept:
            pieces = [Piece(*fields) for fields in parcel]
            shard = ranks[pieces[0].source].shard
            await self.read(shard, [pieces], partial(copy_pieces, tensors))
            await self._settle(shard)
        error: BaseException | None = None
        try:
            await self._fetch_all(tensors, [[Piece(*fields) for fields in parcel] for parcel in parcels], ranks, bound)
        except BaseExceptionGroup as errors:
            # The others follow from the first one, or say the same.
            error = errors.exceptions[0]
        if error is not None:
            try:
                raise error
            finally:
                # Its frames lead here.
                del error
        # The actor gets these objects; nothing is copied, unless another process asks for them.
        return borrow(tensors)

    async def _fetch_all(
        self, tensors: dict[str, torch.Tensor], parcels: list[list[Piece]], ranks: Mapping[int, Source], bound: int
    ) -> None:
        room, lenders = Room(self.transit), set[int]()
        with ExitStack() as admissions:
            places = {
                rank: admissions.enter_context(self._admitted(tensors, of_rank, ranks[rank]))
                for rank, of_rank in by_source(parcels).items()
            }

            def is_written(piece: Piece) -> bool:
                return piece.name in places[piece.source]

            async with asyncio.TaskGroup() as group:
                for rank, written in by_source(filtered(parcels, is_written)).items():
                    group.create_task(self._have_written(tensors, written, ranks[rank], places[rank]))
                for pieces in filtered(parcels, lambda piece: not is_written(piece)):
                    nbytes = nbytes_in([pieces])
                    await room.take(nbytes, bound)
                    lenders.add(pieces[0].source)
                    task = group.create_task(self._fetch(tensors, pieces, ranks[pieces[0].source], bound))
                    task.add_done_callback(partial(room.give_back, nbytes))
        async with asyncio.TaskGroup() as group:
            for rank in lenders:
                group.create_task(self._check_lender(ranks[rank]))

    async def _check_lender(self, source: Source) -> None:
        await resharding_of(self._caller, source.peer, source.label).check_unchanged(Opaque(source.shard))

    def _admitted(
        self, tensors: Mapping[str, torch.Tensor], parcels: Iterable[Sequence[Piece]], source: Source
    ) -> AbstractContextManager[Mapping[str, Grant]]:
        route = self._caller.connections.route_to(source.peer)
        if not route.shares_memory:
            return nullcontext({})
        names = {piece.name for pieces in parcels for piece in pieces}
        return self._store.admitted({name: tensors[name] for name in names}, route)

    async def _have_written(
        self,
        tensors: Mapping[str, torch.Tensor],
        parcels: list[list[Piece]],
        source: Source,
        grants: Mapping[str, Grant],
    ) -> None:
        actor = resharding_of(self._caller, source.peer, source.label)
        places: dict[str, Memory] = {
            name: (grant, dtype_name(tensors[name].dtype), tuple(tensors[name].shape)) for name, grant in grants.items()
        }
        told = [[tuple(piece) for piece in pieces] for pieces in parcels]
        began = self._process.env.monotonic()
        with _noting(parcels[0][0].name, source.label):
            await actor.write(Opaque(source.shard), told, places, self._process.id)
        traffic = self._caller.connections.route_to(source.peer).traffic
        traffic.payloads_received += 1
        traffic.payload_received += nbytes_in(parcels)
        recorder = self._process.recorder
        if recorder is not None:
            recorder.add(trace.fetched(began, recorder.now(), "shm", nbytes_in(parcels), source.peer))

    async def _fetch(self, tensors: dict[str, torch.Tensor], pieces: list[Piece], source: Source, bound: int) -> None:
        """Bring one parcel: straight to where it belongs, if that is one place."""
        actor = resharding_of(self._caller, source.peer, source.label)
        parcel = actor.cut(Opaque(source.shard), [tuple(piece) for piece in pieces], bound, self._process.id)
        try:
            with _noting(pieces[0].name, source.label):
                place = target_part(tensors, pieces[0]) if len(pieces) == 1 else None
                if place is not None and place.is_contiguous() and place.nbytes > INLINE_LIMIT:
                    await parcel.into(bytes_of(place))
                else:
                    flat = await parcel
                    await self._copy(partial(unpack, tensors, flat, pieces), flat.nbytes)
        finally:
            # At once: a cancelled `into` cancels nothing, and a traceback may refer to the ref.
            parcel.cancel()
            parcel.free()

    # Memory.

    def allocate(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Memory for a tensor; a large one lies where other processes can read it."""
        import torch  # noqa: PLC0415 - optional package

        kind: torch.dtype = getattr(torch, dtype)
        if prod(shape) * kind.itemsize <= INLINE_LIMIT:
            return torch.empty(tuple(shape), dtype=kind)
        return self._store.empty(torch.Size(shape), kind)

    def _stored(self, ref: Ref[Any]) -> StoredValue | None:
        state = state_of(ref)
        return state.stored or self._store.entries.get((state.owner, state.number))

    async def _bring(self, ref: Ref[Any]) -> Any:
        """The shard that a ref names: the objects of the actor while they are as they were, else a copy."""
        stored = self._stored(ref)
        if stored is not None and stored.lent:
            # An accelerator may still have work to do before they are as they were returned.
            await stored.wait_filled()
            objects = stored.objects()
            if objects is not None:
                return await self._store.decode(objects)
        return await state_of(ref).bring()

    async def _open(self, ref: Ref[Any], pieces: Sequence[Piece]) -> Opened:
        stored = self._stored(ref)
        opened = None if stored is None else self._opened.get(stored)
        if opened is None or not opened.are_unchanged(pieces):
            shard = await self._bring(ref)
            opened = Opened(shard, {name: version_of(tensor) for name, tensor in shard.items()})
            if stored is not None and stored.wholly_lent:
                # Nothing was written before its writes were counted.
                stored.check_unchanged()
                self._opened[stored] = opened
        return opened

    async def _lend(
        self, ref: Ref[Mapping[str, torch.Tensor]], pieces: Sequence[Piece], target: PeerId
    ) -> InPlace | None:
        stored = self._stored(ref)
        if len(pieces) > 1 or pieces[0].nbytes <= INLINE_LIMIT or stored is None or stored.packed or not stored.lent:
            return None
        given = source_part((await self._open(ref, pieces)).tensors, pieces[0])
        if not (given.is_cpu and given.is_contiguous()) or given.is_conj() or given.is_neg():
            return None
        return self._store.lend_to(self._caller.connections.route_to(target), bytes_of(given))

    async def read(
        self,
        ref: Ref[Mapping[str, torch.Tensor]],
        parcels: Sequence[list[Piece]],
        copy: Callable[[Mapping[str, torch.Tensor], list[Piece]], object],
        run: Callable[[Callable[[], object]], Awaitable[object]] | None = None,
    ) -> None:
        async def run_copy(job: Callable[[], object], pieces: Sequence[Piece]) -> None:
            await (run(job) if run is not None else self._copy(job, nbytes_in([pieces])))

        stored = self._stored(ref)
        if stored is not None and stored.in_host_memory:
            with stored.in_place() as received:
                opened = self._opened.get(stored)
                if opened is None:
                    opened = self._opened[stored] = Opened(await self._store.decode(received), {})
                for pieces in parcels:
                    await run_copy(partial(copy, opened.tensors, pieces), pieces)
                stored.check_unchanged()
            return
        for pieces in parcels:
            unchanged = False
            while not unchanged:
                opened = await self._open(ref, pieces)
                await run_copy(partial(copy, opened.tensors, pieces), pieces)
                unchanged = opened.are_unchanged(pieces)

    async def _settle(self, ref: Ref[Mapping[str, torch.Tensor]]) -> None:
        stored = self._stored(ref)
        if stored is not None and stored.lent:
            await wait_passed()
            stored.check_unchanged()

    async def _copy(self, job: Callable[[], object], nbytes: int) -> None:
        if nbytes > SYNC_COPY:
            await self._store.run_to_end(job)
        else:
            job()


def resharding_of(caller: Caller, peer: PeerId, label: str) -> Resharding:
    return cast("Resharding", caller.handle(peer, RESHARDING, label, Resharding))


def beside(host: Target, actor: ActorId, cls: type) -> Any:
    """A system actor in the process of an actor. Calls wait for a host that is being restarted."""
    if isinstance(host, FollowingTarget) and host.place.peer == NOWHERE:
        return Handle(TargetBeside(host, actor, host.arrive()), cls)
    return host.caller.handle(host.remote, actor, host.label, cls, host.sink)


@contextmanager
def _noting(name: str, label: str) -> Generator[None]:
    try:
        yield
    except DaftError as error:
        add_note(error, f"{name!r} was on its way from {label} for a new layout")
        raise
