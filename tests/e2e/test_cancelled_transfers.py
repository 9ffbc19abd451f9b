"""A cancellation of anything, anywhere: memory and grants go back."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from inside import peer_of
from packing import LARGE, MEDIUM, Helper, Packer, Warden, in_use

import aiodaft
from aiodaft._protocol.connections import session
from aiodaft._protocol.connections.messages import FLOW
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.actor import target_of
from aiodaft.reading import Borrowed
from aiodaft_transport import GrantError, Transport

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def spawn(rt: aiodaft.Runtime) -> tuple[Packer, Warden]:
    packer = await rt.spawn(Packer)
    return packer, await rt.on(with_=packer).spawn(Warden)


async def test_a_result_that_is_cancelled_while_it_is_packed(module_rt: aiodaft.Runtime) -> None:
    packer, warden = await spawn(module_rt)
    await warden.hold_helper()
    result = packer.make()
    await warden.wait_packing()
    result.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await result
    await warden.let_helper_go()
    assert await warden.in_use() == 0


async def test_a_stream_that_is_ended_while_an_item_is_packed(module_rt: aiodaft.Runtime) -> None:
    packer, warden = await spawn(module_rt)
    await warden.hold_helper()
    stream = packer.items()
    await warden.wait_packing()
    await stream.aclose()
    await warden.let_helper_go()
    assert await warden.in_use() == 0


async def test_an_argument_of_a_call_that_is_cancelled_before_it_is_looked_at(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    packer, warden = await spawn(module_rt)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    await warden.hold_loop(str(fifo))
    # Both messages are there when the loop turns again.
    call = packer.take(bytes(MEDIUM))
    call.cancel()
    await asyncio.sleep(0)
    fifo.write_bytes(b"")
    with pytest.raises(aiodaft.CallCancelled):
        await call
    while in_use(peer_of(module_rt)):
        await warden.in_use()


async def test_a_value_that_is_freed_in_the_moment_in_which_it_is_there(module_rt: aiodaft.Runtime) -> None:
    peer = peer_of(module_rt)
    helper = Helper(peer)
    ref = module_rt.put(bytes(LARGE))
    _, number, *_ = peer.refs.describe(ref)
    found: list[object] = []
    peer.transfer.locate((peer.process.id, CallId(number)), found.append)
    del ref
    await helper.let_go()
    while not found:
        await asyncio.sleep(0)
    assert [type(place) for place in found] == [aiodaft.exceptions.OwnerDied]
    assert in_use(peer) == 0


@pytest.mark.parametrize("case", ["a call that was cancelled", "a call too many"])
async def test_grants_in_a_message_that_is_never_sent(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is room for the bytes of one call.
    monkeypatch.setattr(session, "WINDOW_BYTES", MEDIUM + MEDIUM // 2)
    async with aiodaft.Runtime(preload=(), max_pending=2) as rt:
        peer, packer = peer_of(rt), await rt.spawn(Packer)
        first, second = packer.take_at_last(bytes(MEDIUM)), packer.take_at_last(bytes(MEDIUM))
        assert (peer.connections[target_of(packer).remote].session.waiting, in_use(peer)) == (1, 2)
        if case == "a call too many":
            with pytest.raises(aiodaft.Overloaded):
                packer.take_at_last(bytes(MEDIUM))
            assert in_use(peer) == 2
        second.cancel()
        assert in_use(peer) == 1
        await packer.open_gate()
        assert await first == MEDIUM
        with pytest.raises(aiodaft.CallCancelled):
            await second
        while in_use(peer):
            await packer.open_gate()


async def test_a_cancelled_call_is_not_remembered_for_its_grace_time(module_rt: aiodaft.Runtime) -> None:
    packer = await module_rt.spawn(Packer)
    call = packer.take_at_last(1)
    call.cancel()
    await call.ready()
    state = weakref.ref(state_of(call))
    del call
    await asyncio.sleep(0)
    gc.collect()
    assert state() is None


async def test_results_of_a_graph_when_its_closing_is_cancelled(module_rt: aiodaft.Runtime) -> None:
    packer = await module_rt.spawn(Packer)
    graph = aiodaft.compile(lambda value: packer.make_at_last(value))
    result = graph(1)
    while not (await module_rt.info(packer)).running:
        pass
    closing = asyncio.get_running_loop().create_task(graph.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await packer.open_gate()
    await result.ready()
    del result
    while (await module_rt.info(packer)).stored_bytes:
        pass


async def test_a_value_for_a_graph_that_is_no_more(module_rt: aiodaft.Runtime) -> None:
    peer = peer_of(module_rt)
    stored = await stored_here(module_rt)
    assert stored.block is not None
    item = (0, stored.payload, stored.blobs_for(peer.connections.loopback), (), ())
    message = (FLOW, peer.process.id, peer.process.next_number(), 1, (item, (1, "plain")))
    peer.graphs.handlers[FLOW](peer.connections.loopback, message)
    assert stored.block.grants == 0


# The rule behind all of these: dropped objects go back.


async def stored_here(module_rt: aiodaft.Runtime) -> StoredValue:
    ref = module_rt.put(bytes(MEDIUM))
    await ref.ready()
    stored = state_of(ref).stored
    assert stored is not None
    return stored


@pytest.mark.parametrize("how", ["dropped", "before the first step"])
async def test_a_delivery_that_is_no_longer_stored_is_declined(module_rt: aiodaft.Runtime, how: str) -> None:
    peer = peer_of(module_rt)
    stored = await stored_here(module_rt)
    assert stored.block is not None
    delivery = Delivery(
        peer.store, peer.connections.loopback, stored.payload, stored.blobs_for(peer.connections.loopback), ()
    )
    if how == "before the first step":
        task = peer.process.tasks.start(peer.transfer.receive(delivery), name="receive")
        task.cancel()
        await asyncio.wait([task])
        del task
    assert stored.block.grants == 1
    del delivery
    await asyncio.sleep(0)
    assert stored.block.grants == 0


async def test_what_was_lent_is_not_read_any_more_once_it_is_dropped(module_rt: aiodaft.Runtime) -> None:
    lent = Borrowed(bytes(MEDIUM))
    stored = peer_of(module_rt).store.keep(lent.value, Names("a value"), lender=lent)
    assert not stored.packed
    del stored
    await lent.released()


async def test_a_value_that_cannot_be_granted_as_a_whole_is_not_granted_in_part(module_rt: aiodaft.Runtime) -> None:
    peer = peer_of(module_rt)
    tensors = [aiodaft.memory.empty((MEDIUM,)) for _ in range(2)]
    stored = peer.store.keep(tensors, Names("tensors"))
    peer.store.pack_here(stored)
    (first, _), (second, _) = stored.blobs()
    second.release()
    with pytest.raises(GrantError):
        stored.blobs_for(peer.connections.loopback)
    assert first.grants == 0


class Breaking:
    """A connection that breaks when a transport sends a note."""

    remote = peer = PeerId("gone")
    shares_memory = True
    reached_by = ()
    lost: Exception | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.traffic = Traffic()

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        if self.lost is None:
            self.lost = ConnectionResetError()
            self._transport.peer_lost(self.peer)


async def test_a_process_that_is_lost_while_it_is_told_of_a_value_is_granted_nothing(
    module_rt: aiodaft.Runtime,
) -> None:
    peer = peer_of(module_rt)
    tensors = [aiodaft.memory.empty((MEDIUM,)) for _ in range(2)]
    stored = peer.store.keep(tensors, Names("tensors"))
    peer.store.pack_here(stored)
    (first, _), (second, _) = stored.blobs()
    connection: Any = Breaking(peer.store.transport)
    assert stored.blobs_for(connection) is None
    assert connection.lost is not None
    assert (first.grants, second.grants) == (0, 0)
