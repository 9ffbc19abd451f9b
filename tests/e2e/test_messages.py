"""Messages between the members of a group, without the controller (rows MP1 and GC3)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from mailing import Counts, Member
from supervised import AT_ONCE

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def until_waiting(member: Member, count: int = 1) -> None:
    """Until so many receives of a member wait."""
    while (await member.counts()).waiting < count:
        pass


async def until_sent(member: Member, count: int) -> None:
    """Until so many messages for a member are there, or wait for room."""
    while (await member.counts()).messages < count:
        pass


async def kill(member: Member) -> None:
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await member.die()


async def test_a_receive_may_come_before_its_message_and_after_it(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    early = b.recv(0)
    await until_waiting(b)
    await a.send(1, "first")
    assert await early == "first"
    await a.send(1, {"second": [2, np.ones(3)]})
    assert (await b.counts()).messages == 1
    late = await b.recv(0)
    assert late["second"][0] == 2
    assert np.array_equal(late["second"][1], np.ones(3))
    # A member may send to itself.
    await a.send(0, None)
    assert await a.recv_message(0) == aiodaft.typing.Message(None, 0, 0)


async def test_a_receive_does_not_wait_for_a_member_that_waits_for_one_whose_call_has_failed(
    rt: aiodaft.Runtime,
) -> None:
    group = await rt.group(3, Member)
    with pytest.raises(ExceptionGroup) as info:
        await group.each(Member.recv_or_fail, [None, 0, 1])
    assert sorted(type(error).__name__ for error in info.value.exceptions) == ["CallCancelled"] * 2 + ["ValueError"]
    for error in info.value.exceptions:
        assert "ValueError: a bad batch" in f"{type(error).__name__}: {error}"
    # Later calls are not concerned.
    late = group[2].recv(1)
    await until_waiting(group[2])
    await group[1].send(2, "late")
    assert await late == "late"


@pytest.mark.parametrize("shared", [False, True])
async def test_a_send_does_not_wait_for_room_at_a_member_whose_call_has_failed(
    rt: aiodaft.Runtime, shared: bool
) -> None:
    hosts = await rt.group(1, Member)
    group = await (rt.on(with_=hosts[0]) if shared else rt).group(3, Member)
    await group[0].limit(1, MIB)
    refs = group.each(Member.send_or_fail, [None, 0, 0])
    await until_sent(group[0], 4)
    await group[0].send(0, "now", "fail")
    with pytest.raises(ValueError, match="a bad batch"):
        await refs[0]
    for ref in refs[1:]:
        with pytest.raises(aiodaft.CallCancelled, match="a bad batch") as caught:
            await ref
        assert f"raised for send of {group.id} to Member-" in str(caught.value.__notes__)
    # Messages that waited are withdrawn.
    assert [await group[0].recv(), await group[0].recv()] == ["first", "first"]
    assert [await group[rank].recv(rank) for rank in (1, 2)] == ["first again"] * 2
    late = group[0].recv()
    await until_waiting(group[0])
    await group[1].send(0, "late")
    assert await late == "late"


async def test_a_receive_selects_by_sender_and_tag(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    for rank, value, tag in [(0, "a", "x"), (0, "b", 7), (1, "c", "x"), (1, "d", 7), (0, "e", 7)]:
        await group[rank].send(2, value, tag)
    receiver = group[2]
    assert await receiver.recv(1, 7) == "d"
    assert await receiver.recv(None, 7) == "b"
    assert await receiver.recv(1) == "c"
    assert await receiver.recv_message(0) == aiodaft.typing.Message("a", 0, "x")
    assert await receiver.recv_message() == aiodaft.typing.Message("e", 0, 7)
    assert await receiver.counts() == Counts(boxes=1)


async def test_messages_of_one_sender_do_not_overtake_whatever_their_size(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    values: list[Any] = [
        np.full(size, float(place), np.float32) for place, size in enumerate((MIB, 3, 1 << 15, 2, 1, MIB, 5))
    ]
    values += ["text", b"x" * MIB, 3]
    sent = a.send_all(1, values)
    received = await b.recv_many(len(values), 0)
    await sent
    assert [type(value) for value in received] == [type(value) for value in values]
    assert all(np.array_equal(got, put) for got, put in zip(received[:7], values[:7], strict=True))
    assert received[7:] == values[7:]


async def test_both_may_send_128_mib_before_they_receive(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    # More than fits.
    await group.all(Member.limit, 1, MIB)
    before = rt.traffic()
    assert await group.all(Member.exchange, 128 * MIB) == [(True, 128 * MIB)] * 2
    after = rt.traffic()
    # The payload does not pass the controller.
    assert after.control_received - before.control_received < 1 << 16
    assert after.payload_received == before.payload_received
    assert all(counts[1:3] == (0, 0) for counts in await group.all(Member.counts))


@pytest.mark.parametrize("transport", ["tcp"])
async def test_other_transports_carry_messages(transport: str) -> None:
    async with aiodaft.Runtime(transport=transport, gpus=0) as rt:
        group = await rt.group(2, Member)
        assert await group.all(Member.exchange, 4 * MIB) == [(True, 4 * MIB)] * 2


async def test_a_message_is_one_call_and_the_controller_has_no_part_in_it(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Member)
    await group.all(Member.pass_on, 1)
    rounds = 250
    controller, members = rt.traffic(), await group.all(Member.traffic)
    assert await group.all(Member.pass_on, rounds) == [3 * rounds, 3 * rounds - 2, 3 * rounds - 1, 3 * rounds]
    after, members_after = rt.traffic(), await group.all(Member.traffic)
    # The calls of this test, and the runtime's own messages; 1,000 messages went round.
    assert after.messages_sent - controller.messages_sent < 50
    assert after.messages_received - controller.messages_received < 50
    for before, now in zip(members, members_after, strict=True):
        # One message and the answer to the one that came, for each round.
        assert now.messages_sent - before.messages_sent <= 2 * rounds + 20


async def test_a_full_inbox_makes_senders_wait_but_not_for_what_is_wanted(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    await b.limit(2, 1 << 30)
    sends = [a.send(1, number, number) for number in range(5)]
    await until_sent(b, 5)
    await asyncio.gather(*sends[:2])
    assert not any(send.done() for send in sends[2:])
    # A message that a receive waits for needs no room.
    assert await b.recv(0, 4) == 4
    await sends[4]
    assert not any(send.done() for send in sends[2:4])
    assert await b.recv_many(4, 0) == [0, 1, 2, 3]
    await asyncio.gather(*sends)
    # The same by bytes: the values that wait stay with their sender.
    await b.limit(100, 3 * MIB)
    sends = [a.send_zeros(1, 2 * MIB) for _ in range(3)]
    await until_sent(b, 3)
    await sends[0]
    counts = await b.counts()
    assert (counts.messages, counts.nbytes) == (3, pytest.approx(2 * MIB, rel=0.01))
    assert not any(send.done() for send in sends[1:])
    await b.limit(100, 5 * MIB)
    await sends[1]
    assert [await b.recv_size(0) for _ in range(3)] == [2 * MIB] * 3
    await sends[2]
    with pytest.raises(ValueError, match="positive number of messages and bytes, not 0, 1"):
        await b.limit(0, 1)


async def test_a_cancelled_receive_loses_nothing_and_a_cancelled_send_is_withdrawn(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    waiting = b.recv(0)
    await until_waiting(b)
    waiting.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await waiting
    await a.send(1, "kept")
    assert await b.recv(0) == "kept"
    # A timeout works, too.
    assert await b.recv_within(0, 0) == "too late"
    await b.limit(1, MIB)
    await a.send(1, "there")
    withdrawn = a.send_zeros(1, 2 * MIB)
    await until_sent(b, 2)
    withdrawn.cancel()
    with pytest.raises(aiodaft.CallCancelled):
        await withdrawn
    assert await b.recv(0) == "there"
    await a.send(1, "next")
    assert await b.recv(0) == "next"
    assert await b.counts() == Counts(boxes=1, watches=1)


async def test_cancelled_receives_lose_no_message_and_keep_the_order(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    received = b.recv_impatiently(200)
    await a.send_all(1, list(range(200)))
    assert await received == list(range(200))


async def test_the_death_of_a_sender_ends_the_wait_for_it_and_is_named(rt: aiodaft.Runtime) -> None:
    a, b, c = group = await rt.group(3, Member)
    await a.send(1, "last words")
    from_a, from_any, from_c = b.recv(0, "never"), b.recv(None, "never"), b.recv(2)
    await until_waiting(b, 3)
    await kill(a)
    with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[0\] .* SIGKILL") as caught:
        await from_a
    assert f"of {group.id} was waited for" in str(caught.value.__notes__)
    assert not from_any.done()
    # Messages that came before are given first.
    assert await b.recv(0) == "last words"
    with pytest.raises(aiodaft.ActorDied, match=r"\[0\]"):
        await b.recv(0)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await b.send(0, "too late")
    # The last of those that could have sent.
    await rt.stop(c)
    for waiting in (from_any, from_c):
        with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[2\] .* was stopped"):
            await waiting
    with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[2\].* was stopped"):
        await b.send(2, "too late")
    with pytest.raises(aiodaft.ActorDied):
        await b.recv()
    assert await b.counts() == Counts(boxes=1)


async def test_a_sender_that_waits_for_room_hears_of_the_death_of_its_receiver(rt: aiodaft.Runtime) -> None:
    a, b, c = await rt.group(3, Member)
    for receiver, rank in ((b, 1), (c, 2)):
        await receiver.limit(1, MIB)
        await a.send(rank, "first")
        waits = a.send_zeros(rank, 2 * MIB)
        await until_sent(receiver, 2)
        if receiver is b:
            await kill(b)
        else:
            await rt.stop(c)
        with pytest.raises(aiodaft.ActorDied, match=rf"Member-\d+\[{rank}\].* was (killed by SIGKILL|stopped)"):
            await waits


async def test_a_sender_that_waits_for_room_hears_that_its_receiver_leaves_or_is_restarted(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=aiodaft.Restart(intensity=9, backoff=AT_ONCE)).group(3, Member)

    async def fill(rank: int) -> aiodaft.Ref[None]:
        await group[rank].limit(1, MIB)
        await group[0].send(rank, "first")
        waits = group[0].send(rank, "second")
        await until_sent(group[rank], 2)
        return waits

    stays, leaves = await fill(1), await fill(2)
    await group.resize(2)
    with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[2\].* was stopped"):
        await leaves
    assert not stays.done()
    assert await group[1].recv_many(2, 0) == ["first", "second"]
    await stays
    restarted = await fill(1)
    await kill(group[1])
    with pytest.raises(aiodaft.ActorDied, match=r"Member-\d+\[1\] .* SIGKILL"):
        await restarted


async def test_the_end_of_a_member_frees_its_inbox(rt: aiodaft.Runtime) -> None:
    # Processes that go on.
    hosts = await rt.group(2, Member)
    with pytest.raises(ZeroDivisionError):
        async with rt.scope() as scope:
            a, b = await scope.on(with_=hosts).group(2, Member)
            await b.limit(2, 3 * MIB)
            await a.send_zeros(1, 2 * MIB)
            await a.send(1, "one more")
            sends = a.send_zeros(1, 2 * MIB)
            await until_sent(b, 3)
            receives = [a.recv(1), b.recv(0, "never")]
            await until_waiting(a)
            await until_waiting(b)
            assert await hosts.all(Member.counts) == [
                Counts(boxes=1, waiting=1, watches=1),
                Counts(boxes=1, messages=3, waiting=1, watches=1, nbytes=(await b.counts()).nbytes),
            ]
            raise ZeroDivisionError
    for ref in (sends, *receives):
        with pytest.raises((aiodaft.ActorDied, aiodaft.CallCancelled)):
            await ref
    assert await hosts.all(Member.counts) == [Counts()] * 2
    while any(info.stored_bytes for info in [await rt.info(host) for host in hosts]):
        pass


async def test_members_in_one_process_pass_the_object_itself(rt: aiodaft.Runtime) -> None:
    hosts = await rt.group(1, Member)
    group = await rt.on(with_=hosts[0]).group(2, Member)
    await group[0].send_zeros(1, 2 * MIB)
    counts = await hosts[0].counts()
    assert (counts.messages, counts.nbytes) == (1, 0)
    assert await group[1].recv_size(0) == 2 * MIB
    await rt.stop(group[0])
    with pytest.raises(aiodaft.ActorDied, match=r"\[0\] .* was stopped"):
        await group[1].recv(0)


async def test_messages_stay_with_their_sender_when_the_group_changes(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Member)
    for rank in (1, 2):
        await group[rank].send(0, rank)
    waiting = group[0].recv(2, "never")
    await until_waiting(group[0])
    await group.resize(2)
    # The member that left sends nothing more; its messages are there, from a rank that is none any more.
    with pytest.raises(aiodaft.ActorDied, match=r"\[2\] .* was stopped"):
        await waiting
    assert await group[0].recv_now(1) == aiodaft.typing.Message(1, 1, 0)
    assert await group[0].recv_now() == aiodaft.typing.Message(2, None, 0)
    await group.resize(3)
    with pytest.raises(ValueError, match="has ranks from 0 to 2, not 3"):
        await group[0].send(3, "to nobody")
    await group[2].send(0, "new")
    assert await group[0].recv_now(2) == aiodaft.typing.Message("new", 2, 0)


async def test_a_restarted_member_sends_and_receives_as_the_next_one(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=aiodaft.Restart("permanent", intensity=9, backoff=AT_ONCE)).group(2, Member)
    await group[1].send(0, "from the first life")
    waiting = group[0].recv(1, "never")
    # A receive that the first life does not hear of waits for the second one.
    while not await group[1].is_watched():
        pass
    await kill(group[1])
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await waiting
    again = group[0].recv(1, "second")
    await group[1].send(0, "from the second life", "second")
    assert await again == "from the second life"
    assert await group[0].recv(1) == "from the first life"
    await group[0].send(1, "to the second life")
    assert await group[1].recv(0) == "to the second life"


async def test_messages_of_a_call_of_a_group_meet_only_those_of_the_same_call(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    first = group.each(Member.swap, ["a0", group[1].recv(1, "later")])
    await until_sent(group[1], 1)
    # A later call of the group is the first that begins at this member.
    assert await group.each(Member.swap, ["b0", "b1"]) == ["b1", "b0"]
    await group[1].send(1, "a1", "later")
    assert await first == ["a1", "a0"]


async def test_cannon_is_the_product_of_the_matrices_also_of_several_at_a_time(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Member, axes={"row": 2, "column": 2})

    def blocks(matrix: Any) -> list[Any]:
        return [np.ascontiguousarray(block) for row in np.vsplit(matrix, 2) for block in np.hsplit(row, 2)]

    pairs = [np.random.default_rng(turn).standard_normal((2, 64, 64)) for turn in range(4)]
    products = [group.each(Member.multiply, list(zip(blocks(a), blocks(b), strict=True))) for a, b in pairs]
    for (a, b), product in zip(pairs, products, strict=True):
        parts = await product
        whole = np.vstack([np.hstack(parts[:2]), np.hstack(parts[2:])])
        assert np.allclose(whole, a @ b, rtol=0, atol=1e-12)


async def test_members_that_wait_for_each_other_are_seen_and_end_by_a_timeout(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Member)
    first = group[0].recv(1)
    await until_waiting(group[0])
    assert "await self.group.recv(" in str(await rt.stack())
    async with aiodaft.deadline(60):
        assert await group[1].recv_within(0.01, 0) == "too late"
    await group[1].send(0, "at last")
    assert await first == "at last"


async def test_misuse_is_refused_with_what_to_do(rt: aiodaft.Runtime) -> None:
    a, b = await rt.group(2, Member)
    with pytest.raises(ValueError, match="has ranks from 0 to 1, not 2"):
        await a.recv(2)
    with pytest.raises(TypeError, match="a tag is a number or a string"):
        await a.send(1, "x", (1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tag is a number or a string, not 1.5"):
        await a.recv(1, 1.5)  # type: ignore[arg-type]
    assert "use an `async def` method" in await a.recv_in_thread()
    assert await b.counts() == Counts()


async def test_the_end_of_the_runtime_ends_what_waits() -> None:
    async with aiodaft.Runtime(gpus=0, stop_grace=0, unhandled="log") as rt:
        group = await rt.group(2, Member)
        waiting = [group[0].recv(1), group[1].recv(0)]
        for member in group:
            await until_waiting(member)
    for ref in waiting:
        with pytest.raises(aiodaft.DaftError):
            await ref


async def test_messages_go_between_threads_in_the_order_of_the_sends(rt: aiodaft.Runtime) -> None:
    members = await rt.group(2, Member)
    for values in ([1, "two", [3]], [np.full(MIB, float(number), np.float32) for number in range(3)]):
        for received in await members.all(Member.swap_in_threads, values):
            assert len(received) == len(values)
            for one, value in zip(received, values, strict=True):
                assert np.array_equal(one, value) if isinstance(value, np.ndarray) else one == value
    # A ref that is dropped takes nothing back.
    await members[0].send_and_drop(1, "dropped")
    assert await members[1].recv_beside(0) == "dropped"


async def test_a_thread_that_receives_hears_of_the_end_of_the_sender(rt: aiodaft.Runtime) -> None:
    a, b = await rt.on(restart="temporary").group(2, Member)
    receiving = b.recv_beside(0)
    await until_waiting(b)
    await kill(a)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await receiving
