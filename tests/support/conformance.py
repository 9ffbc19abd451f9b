"""Checks that every transport must pass; any test runner can call them.

`CHECKS` maps a name to an async function of one `Pair`: two ends of a transport in this process, with control links
that carry notes between them in order.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol

from aiodaft_transport.abc import Control, Grant, Transport
from aiodaft_transport.exceptions import TransportError
from aiodaft_transport.memory import Block, address_of

POISON: Final = b"\xee"
SIZES: Final = (1, 63, 64, 4096, 65_537, (1 << 20) + 1, 8 << 20, (17 << 20) + 5)


class End(Protocol):
    """One process of a pair."""

    @property
    def transport(self) -> Transport:
        """The transport of this end."""
        ...

    @property
    def control(self) -> Control:
        """The link to the other end."""
        ...

    def live_blocks(self) -> int:
        """The number of blocks that this end has in use."""
        ...


class Pair(Protocol):
    """Two ends of one transport."""

    @property
    def producer(self) -> End:
        """The end that has the blocks."""
        ...

    @property
    def consumer(self) -> End:
        """The end that fetches them."""
        ...

    async def settle(self) -> None:
        """Wait until all notes under way have been handled."""
        ...


class LoopbackControl:
    """A control link inside one process: notes are handled in order on the next turn of the loop."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.deliver: Callable[[bytes, Sequence[int]], None] | None = None
        self.notes = 0
        self.fds = 0

    @property
    def peer(self) -> str:
        return self._peer

    def connect(self, transport: Transport, back: Control) -> None:
        """Set the transport that gets the notes, and the link back."""
        self.deliver = lambda note, fds: transport.note_received(back, note, fds)

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        self.notes += 1
        self.fds += len(fds)
        if self.deliver is not None:
            asyncio.get_running_loop().call_soon(self.deliver, note, [os.dup(fd) for fd in fds])


class _BreakingControl(LoopbackControl):
    """A control link that finds its peer gone when the first note is sent."""

    def __init__(self, transport: Transport, peer: str) -> None:
        super().__init__(peer)
        self._transport = transport

    def send_note(self, transport: str, note: bytes, fds: Sequence[int] = ()) -> None:
        super().send_note(transport, note, fds)
        if self.notes == 1:
            self._transport.peer_lost(self.peer)


def fill(block: Block, seed: int = 1) -> bytes:
    """Write a pattern that differs with the seed, and return it."""
    pattern = bytes((index * 7 + seed) % 251 for index in range(251))
    content = (pattern * (block.nbytes // 251 + 1))[: block.nbytes]
    block.view[:] = content
    return content


async def granted(pair: Pair, nbytes: int, seed: int = 1) -> tuple[Block, Grant, bytes]:
    """A filled block, a grant of it for the consumer, and its content."""
    block = pair.producer.transport.allocate(nbytes)
    content = fill(block, seed)
    grant = pair.producer.transport.grant(block, pair.producer.control)
    await pair.settle()
    return block, grant, content


async def fetched(pair: Pair, grant: Grant) -> memoryview:
    """Fetch a grant at the consumer."""
    return await pair.consumer.transport.fetch(grant, pair.consumer.control)


async def check_every_size_arrives_unchanged_and_aligned(pair: Pair) -> None:
    for nbytes in SIZES:
        block, grant, content = await granted(pair, nbytes)
        view = await fetched(pair, grant)
        # Views are compared byte by byte, ten times slower.
        assert bytes(view) == content
        assert view.format == "B"
        assert not view.readonly
        assert address_of(view) % 64 == 0
        block.release()


async def check_what_a_consumer_writes_is_private_to_it(pair: Pair) -> None:
    block, grant, content = await granted(pair, 1 << 20)
    again = pair.producer.transport.grant(block, pair.producer.control)
    first = await fetched(pair, grant)
    first[:4096] = bytes(4096)
    second = await fetched(pair, again)
    assert second == content
    assert block.view == content
    assert first[:4096] == bytes(4096)


async def check_a_reused_block_shows_its_new_content_where_the_consumer_wrote(pair: Pair) -> None:
    for seed in range(1, 6):
        block, grant, content = await granted(pair, 1 << 20, seed)
        view = await fetched(pair, grant)
        assert view == content
        view[5000:9000] = bytes(4000)
        del view
        await _returned(pair)
        block.release()
    assert pair.producer.live_blocks() == 0


async def check_a_forked_child_keeps_seeing_what_the_parent_has_dropped(pair: Pair) -> None:
    block, grant, content = await granted(pair, 1 << 20)
    view = await fetched(pair, grant)
    child = ForkedChild(partial(view.__eq__, content))
    del view
    await _returned(pair)
    block.release()
    # The pool reuses the last freed block first.
    await granted(pair, 1 << 20, seed=2)
    assert child.finds_it_true()


class ForkedChild:
    """A forked child that evaluates a condition when it is asked."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        asked, self._asking = os.pipe()
        self._told, telling = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._asking)
                os.read(asked, 1)
                os.write(telling, b"true" if condition() else b"false")
            finally:
                os._exit(0)
        os.close(asked)
        os.close(telling)

    def finds_it_true(self) -> bool:
        """Whether the condition is true in the child; ends the child."""
        os.close(self._asking)
        with open(self._told, "rb") as told:
            answer = told.read()
        os.waitpid(self._pid, 0)
        return answer == b"true"


async def check_a_block_is_kept_while_a_view_lives_and_freed_after(pair: Pair) -> None:
    block, grant, content = await granted(pair, 300_000)
    view = await fetched(pair, grant)
    block.release()
    part = view[1000:2000]
    del view
    other, _, _ = await granted(pair, 300_000, seed=9)
    assert part == content[1000:2000]
    del part
    await _returned(pair)
    other.release()


async def check_a_declined_grant_frees_the_block(pair: Pair) -> None:
    block, grant, _ = await granted(pair, 100_000)
    block.release()
    pair.consumer.transport.decline(grant, pair.consumer.control)
    await pair.settle()
    assert pair.producer.live_blocks() == 0


async def check_a_grant_that_was_not_sent_is_taken_back(pair: Pair) -> None:
    block, grant, _ = await granted(pair, 100_000)
    block.release()
    pair.producer.transport.revoke(grant, pair.producer.control)
    await pair.settle()
    assert pair.producer.live_blocks() == 0
    pair.producer.transport.peer_lost(pair.producer.control.peer)
    pair.producer.transport.revoke(grant, pair.producer.control)


async def check_many_at_once(pair: Pair) -> None:
    made = [await granted(pair, 100_000 + index, seed=index) for index in range(40)]
    views = await asyncio.gather(*(fetched(pair, grant) for _, grant, _ in reversed(made)))
    assert [view == content for view, (_, _, content) in zip(views, reversed(made), strict=True)] == [True] * 40


async def check_a_cancelled_fetch_leaves_the_pair_working_and_nothing_behind(pair: Pair) -> None:
    for ticks in range(1, 12):
        block, grant, _ = await granted(pair, 6 << 20)
        task = asyncio.get_running_loop().create_task(fetched(pair, grant))
        await _turns(ticks)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        block.release()
        del task
    block, grant, content = await granted(pair, 6 << 20, seed=77)
    assert await fetched(pair, grant) == content
    block.release()
    await _all_returned(pair)


async def check_a_lost_consumer_frees_what_it_was_granted(pair: Pair) -> None:
    block, _, _ = await granted(pair, 200_000)
    block.release()
    assert pair.producer.live_blocks() == 1
    pair.producer.transport.peer_lost(pair.producer.control.peer)
    assert pair.producer.live_blocks() == 0


async def check_a_consumer_that_is_lost_while_it_is_told_of_a_block_keeps_no_grant(pair: Pair) -> None:
    transport, peer = pair.producer.transport, pair.producer.control.peer
    block, control = transport.allocate(200_000), _BreakingControl(transport, peer)
    fill(block)
    grant = transport.grant(block, control)
    if not control.notes:
        # This transport sends no note.
        transport.peer_lost(peer)
    block.release()
    await pair.settle()
    assert pair.producer.live_blocks() == 0
    transport.revoke(grant, control)


async def check_a_lost_producer_fails_fetches_and_leaves_views_readable(pair: Pair) -> None:
    _, grant, content = await granted(pair, 200_000)
    _, late, _ = await granted(pair, 200_000)
    view = await fetched(pair, grant)
    pair.producer.transport.close()
    pair.consumer.transport.peer_lost(pair.consumer.control.peer)
    assert view == content
    await _fails(fetched(pair, late), "a fetch from a lost producer succeeded")


async def check_an_unknown_grant_is_an_error_and_harms_nothing(pair: Pair) -> None:
    block, grant, content = await granted(pair, 70_000)
    forged = (*grant[:-1], 10**9) if pair.producer.transport.name == "tcp" else (10**9, *grant[1:])
    await _fails(fetched(pair, forged), "an unknown grant was honoured")
    assert await fetched(pair, grant) == content
    block.release()


async def check_every_size_arrives_in_given_memory_and_nowhere_else(pair: Pair) -> None:
    for nbytes in SIZES:
        block, grant, content = await granted(pair, nbytes)
        # At an odd address.
        around = bytearray(POISON * (nbytes + 14))
        await _fetch_into(pair, grant, memoryview(around)[7:-7])
        assert around == POISON * 7 + content + POISON * 7
        block.release()
    await _all_returned(pair)


async def check_given_memory_that_does_not_fit_is_refused_untouched(pair: Pair) -> None:
    for target in (bytearray(69_999), bytearray(70_001), bytes(70_000), memoryview(bytearray(140_000))[::2]):
        block, grant, _ = await granted(pair, 70_000)
        try:
            await _fetch_into(pair, grant, target)
        except ValueError:
            assert not any(target)
        else:
            raise AssertionError(f"70,000 bytes were fetched into {len(target)}")
        block.release()
        await _all_returned(pair)


async def check_memory_is_its_owners_again_once_a_fetch_into_it_is_cancelled(pair: Pair) -> None:
    poison = POISON * (12 << 20)
    for ticks in (0, 1, 2, 3, 5, 8, 13):
        block, grant, _ = await granted(pair, len(poison))
        target = bytearray(len(poison))
        task = asyncio.get_running_loop().create_task(_fetch_into(pair, grant, target))
        await _turns(1 + ticks)
        # A second cancellation must not end the wait early.
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        target[:] = poison
        await _returned(pair)
        assert target == poison
        block.release()
        await pair.settle()
        while pair.producer.live_blocks():
            await asyncio.sleep(0)
    block, grant, content = await granted(pair, 6 << 20, seed=77)
    target = bytearray(6 << 20)
    await _fetch_into(pair, grant, target)
    assert target == content


async def check_memory_is_its_owners_again_once_the_producer_is_lost(pair: Pair) -> None:
    poison = POISON * (24 << 20)
    block, grant, content = await granted(pair, len(poison))
    target = bytearray(len(poison))
    task = asyncio.get_running_loop().create_task(_fetch_into(pair, grant, target))
    await _turns(3)
    pair.producer.transport.peer_lost(pair.producer.control.peer)
    pair.consumer.transport.peer_lost(pair.consumer.control.peer)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    # Shared memory stays readable.
    assert isinstance(result, TransportError) or target == content
    target[:] = poison
    await pair.settle()
    assert target == poison
    block.release()


async def check_registered_memory_is_sent_from_where_it_lies(pair: Pair) -> None:
    transport = pair.producer.transport
    memory = memoryview(bytearray(1 << 20))
    transport.register(address_of(memory), len(memory))
    transport.register(address_of(memory), len(memory))
    parts = [transport.block_at(memory[start:]) for start in (0, 1000, 70_001)]
    if None in parts:
        # The transport grants only blocks that it allocated.
        return
    transport.unregister(address_of(memory))
    # The blocks made before can still be read.
    assert transport.block_at(memory) is None
    for seed, block in enumerate(parts):
        assert block is not None
        content = fill(block, seed)
        assert memory[-block.nbytes :] == content
        grant = transport.grant(block, pair.producer.control)
        await pair.settle()
        assert await fetched(pair, grant) == content
        await _returned(pair)
        assert block.grants == 0
    assert pair.producer.live_blocks() == 0


async def _fetch_into(pair: Pair, grant: Grant, target: bytes | bytearray | memoryview) -> None:
    await pair.consumer.transport.fetch_into(grant, pair.consumer.control, memoryview(target))


async def _returned(pair: Pair) -> None:
    """Let the consumer return the grants of dropped views."""
    gc.collect()
    await pair.settle()


async def _all_returned(pair: Pair) -> None:
    await _returned(pair)
    assert pair.producer.live_blocks() == 0


async def _fails(fetch: Awaitable[object], otherwise: str) -> None:
    """Wait for a fetch that has to fail."""
    try:
        await fetch
    except TransportError:
        return
    raise AssertionError(otherwise)


async def _turns(count: int) -> None:
    """Let the loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)


CHECKS: Final[dict[str, Callable[[Pair], Awaitable[None]]]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
