"""The source of each process's copy of a value: the producer sends it twice, and no processes wait in a circle."""

from __future__ import annotations

import random

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.broadcast import PATIENCE, SENDS, Broadcasts, Fanout, Fetching


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"p{number}") for number in range(count)]


def test_of_processes_that_ask_together_two_are_served_and_the_others_sent_on_evenly() -> None:
    fanout = Fanout()
    names = peers(32)
    sources = {name: fanout.join(name) for name in names}
    assert [name for name, source in sources.items() if source is None] == names[:SENDS]
    passed_on = [sum(source == name for source in sources.values()) for name in names]
    assert max(passed_on) <= SENDS

    def depth(name: PeerId) -> int:
        source = sources[name]
        return 0 if source is None else 1 + depth(source)

    assert max(map(depth, names)) <= 5


def test_a_late_process_finds_the_copy_of_the_second() -> None:
    fanout = Fanout()
    first, second, *late = peers(6)
    assert fanout.join(first) is None
    assert not fanout.keeps(first)
    fanout.leave(first)
    assert fanout.join(second) is None
    assert fanout.keeps(second)
    for name in late:
        assert fanout.join(name) == second
        assert not fanout.keeps(name)
        fanout.leave(name)
    assert fanout.members == [second]


def test_once_the_copy_is_gone_the_next_one_makes_another() -> None:
    fanout = Fanout()
    first, second, third, fourth = peers(4)
    for name in (first, second):
        fanout.join(name)
        fanout.leave(name)
    assert fanout.join(third) is None
    assert fanout.keeps(third)
    assert fanout.join(fourth) == third
    assert fanout.sent == 3


def test_a_process_that_asks_twice_is_told_that_it_is_getting_it() -> None:
    fanout = Fanout()
    (name,) = peers(1)
    assert [fanout.join(name), fanout.join(name)] == [None, name]
    fanout.leave(name)
    assert fanout.join(name) is None


def test_a_process_that_relays_let_down_is_served_by_the_producer_in_the_end() -> None:
    fanout = Fanout()
    first, second, third = peers(3)
    fanout.join(first)
    fanout.join(second)
    sources: list[PeerId | None] = []
    for _ in range(PATIENCE + 1):
        source = fanout.join(third)
        sources.append(source)
        if source is not None:
            fanout.fail(third, source)
    assert sources == [first, second, None]


def test_a_process_that_was_sent_to_one_that_just_left_finds_the_copy_that_is_kept() -> None:
    fanout = Fanout()
    first, keeper, *others, late = peers(13)
    for name in (first, keeper, *others):
        fanout.join(name)
    # The others have the value, and have left; the news of that has not come yet.
    relay = fanout.join(late)
    assert relay in others
    fanout.fail(late, relay)
    assert fanout.join(late) == keeper


def waits_in_a_circle(sources: dict[PeerId, PeerId | None], name: PeerId | None) -> bool:
    seen: set[PeerId] = set()
    while name is not None:
        if name in seen:
            return True
        seen.add(name)
        name = sources.get(name)
    return False


def test_no_deaths_and_departures_make_processes_wait_in_a_circle() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        fanout = Fanout()
        waiting: dict[PeerId, PeerId | None] = {}
        for _ in range(60):
            name = PeerId(f"p{chance.randrange(10)}")
            if name not in waiting:
                waiting[name] = fanout.join(name)
                assert waiting[name] != name
            elif chance.random() < 0.5:
                # It has the value, and passed it on to all who waited here; or it died, and they learn of it.
                orphans = [other for other, source in waiting.items() if source == name]
                died = chance.random() < 0.5
                fanout.leave(name)
                del waiting[name]
                for other in orphans:
                    fanout.fail(other, name)
                    if died:
                        waiting[other] = fanout.join(other)
                    else:
                        fanout.leave(other)
                        del waiting[other]
            assert not any(waits_in_a_circle(waiting, other) for other in waiting)


def on(node: str, count: int) -> list[PeerId]:
    return [PeerId(f"worker-{number}@{node}") for number in range(count)]


def test_the_first_process_of_each_machine_keeps_a_copy_that_the_others_there_read() -> None:
    fanout = Fanout(shared=True)
    machines = [on(node, 4) for node in ("n2", "n3", "n4")]
    for keeper, *others in machines:
        fanout.join(keeper)
        assert fanout.keeps(keeper)
        for name in others:
            assert fanout.join(name) == keeper
            assert not fanout.keeps(name)
            # It has the value, and no copy for others.
            fanout.leave(name)
    assert fanout.sent == SENDS
    assert fanout.members == [keeper for keeper, *_ in machines]


def test_no_machine_gets_a_value_from_a_process_that_only_reads_it() -> None:
    fanout = Fanout(shared=True)
    for name in (*on("n2", 3), *on("n3", 3)):
        fanout.join(name)
    keepers = [on("n2", 1)[0], on("n3", 1)[0]]
    assert [fanout.join(name) in keepers for name in on("n4", 1)] == [True]


def test_a_machine_whose_keeper_failed_gets_another_one() -> None:
    fanout = Fanout(shared=True)
    first, second, third = on("n2", 3)
    fanout.join(first)
    assert fanout.join(second) == first
    fanout.fail(second, first)
    assert fanout.join(second) is None
    assert fanout.keeps(second)
    assert fanout.join(third) == second


def test_a_controller_keeps_no_copy_as_no_process_can_read_it() -> None:
    fanout = Fanout(shared=True)
    first, second = PeerId("controller-1@n2"), PeerId("controller-2@n2")
    assert fanout.join(first) is None
    assert not fanout.keeps(first)
    assert fanout.join(second) is None


# A consumer.

ROOT, OTHER = PeerId("root"), PeerId("other")


def fetching(*, joined: bool = True, keep: bool = False) -> Fetching[str]:
    value: Fetching[str] = Fetching()
    if joined:
        value.joined(ROOT, keep=keep)
    return value


def test_a_member_makes_a_copy_only_if_another_process_waits() -> None:
    value = fetching()
    assert not value.is_alone
    assert not value.wants_copy
    value.waiting.append("a")
    value.waiting.append("b")
    assert value.wants_copy
    assert value.take_waiting() == ["a", "b"]
    assert not value.wants_copy


def test_a_keeper_makes_a_copy_in_any_case_and_stays_one() -> None:
    value = fetching(keep=True)
    assert value.wants_copy
    value.joined(ROOT, keep=False)
    assert value.wants_copy


def test_a_process_that_takes_no_part_makes_no_copy() -> None:
    value = fetching(joined=False)
    value.waiting.append("a")
    assert value.is_alone
    assert not value.wants_copy


def test_the_end_of_the_root_ends_the_part_and_no_other_end_does() -> None:
    value = fetching(keep=True)
    value.left_by(OTHER)
    assert value.root == ROOT
    value.left_by(ROOT)
    assert value.root is None
    assert value.is_alone
    assert not value.wants_copy


# One process.

KEY = ROOT, CallId(7)


def test_processes_are_sent_here_while_any_pull_of_the_value_is_under_way() -> None:
    table: Broadcasts[str] = Broadcasts()
    assert not table.wait(KEY, "a")
    fetching = table.begin(KEY)
    assert table.begin(KEY) is fetching
    assert table.wait(KEY, "a")
    assert table.joined(KEY, ROOT, keep=False)
    assert fetching.wants_copy
    assert not table.end(KEY)
    assert table.wait(KEY, "b")
    assert table.end(KEY)
    assert not table.wait(KEY, "c")
    assert not table.joined(KEY, ROOT, keep=True)
    assert fetching.take_waiting() == ["a", "b"]


def test_the_root_is_told_of_members_that_left_and_of_relays_that_failed() -> None:
    table: Broadcasts[str] = Broadcasts()
    fanout = table.fanouts[KEY] = Fanout()
    first, second, third = peers(3)
    for name in (first, second, third):
        fanout.join(name)
    # The relay of the third gave nothing; the first has no copy for others.
    assert not table.left(KEY, third, first)
    assert not table.left(KEY, first, first)
    assert fanout.members == [second, third]
    assert fanout.join(third) == second


def test_a_root_that_freed_the_value_takes_the_copies_with_it() -> None:
    table: Broadcasts[str] = Broadcasts()
    fetching = table.begin(KEY)
    table.joined(KEY, ROOT, keep=True)
    assert table.left(KEY, ROOT, OTHER)
    assert fetching.is_alone
    table.end(KEY)
    # The value came before.
    assert table.left(KEY, ROOT, OTHER)


def test_a_lost_process_is_no_member_and_no_root() -> None:
    table: Broadcasts[str] = Broadcasts()
    fanout = table.fanouts[OTHER, CallId(8)] = Fanout()
    fanout.join(ROOT)
    fetching = table.begin(KEY)
    table.joined(KEY, ROOT, keep=True)
    table.lost(ROOT)
    assert fanout.members == []
    assert fetching.is_alone
