"""Nodes join, keep their leases and come back to a coordinator that was started again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from aiodaft._protocol.coordination.records import (
    Change,
    Kind,
    LeaseState,
    Member,
    NamedActor,
    Record,
    check_node_name,
    first_revision,
    plain_of,
    record_of,
)
from aiodaft._protocol.coordination.registry import Registry, Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft.exceptions import CoordinatorUnavailable, LeaseLost, NameTaken

TTL: Final = 10.0
FREE: Final = {"cpus": 4.0}


def new_registry(now: float = 0) -> Registry:
    return Registry(Stored(term=5), TTL, now)


def node(name: str, process: str = "node-1", epoch: int = 0) -> Member:
    return Member(name, PeerId(f"{process}@{name}"), "tcp://10.0.0.1:7777", {"rack": "a"}, FREE, FREE, epoch)


def join(registry: Registry, member: Member, now: float = 0, names: Sequence[NamedActor] = ()) -> Member:
    registry.apply(registry.join(member, names, now), now)
    joined = registry.members.get(member.name)
    assert joined is not None
    return joined


def named(name: str, peer: str, actor: int = 16, epoch: int = 0) -> NamedActor:
    return NamedActor(name, PeerId(peer), ActorId(actor), "Model-1", ("m.Model",), epoch=epoch)


def register(registry: Registry, name: str, peer: str, now: float = 0) -> NamedActor:
    registry.apply(registry.register(named(name, peer), now), now)
    return registry.names.lookup(name)


def expire(registry: Registry, now: float) -> list[str]:
    changes = registry.expire(now)
    registry.apply(changes, now)
    return [change.key for change in changes]


def look_until(registry: Registry, now: float, until: float) -> list[str]:
    """Expire leases as often as a coordinator that is not stopped."""
    gone: list[str] = []
    while now < until:
        now = min(until, registry.leases.next_look())
        gone += expire(registry, now)
    return gone


def stored(registry: Registry) -> tuple[Record, ...]:
    return (*registry.names.all(), *registry.members.all())


def test_a_node_that_was_not_heard_is_known_as_lost_until_it_comes_back() -> None:
    registry = new_registry()
    silent, gone = join(registry, node("n1")), join(registry, node("n2"))
    registry.apply(registry.leave(gone.epoch), now=1)
    look_until(registry, 1, 2 * TTL)
    assert registry.lost == {"n1": silent}
    join(registry, node("n1"), now=2 * TTL)
    assert registry.lost == {}


# Names of nodes.


@pytest.mark.parametrize("name", ["n", "node-1", "a" * 63, ".x", "rack.7_b"])
def test_names_of_hosts_can_name_nodes(name: str) -> None:
    assert check_node_name(name) is name


@pytest.mark.parametrize("name", ["", "a" * 64, "a b", "a/b", "a@b", "ä", "a\n", None, 3])
def test_other_text_cannot_name_a_node(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot name a node"):
        check_node_name(name)
    registry = new_registry()
    with pytest.raises(ValueError, match="cannot name a node"):
        registry.join(replace(node("a"), name=name), (), 0)


# Joining.


def test_a_node_gets_an_epoch_and_a_lease() -> None:
    registry = new_registry()
    joined = join(registry, node("a"))
    assert joined.epoch == joined.revision == first_revision(5) + 1
    assert registry.members.all() == [joined]
    assert registry.leases.state(joined.epoch) is LeaseState.HELD


def test_a_node_that_missed_the_answer_gets_the_same_one() -> None:
    registry = new_registry()
    joined = join(registry, node("a"))
    assert registry.join(node("a"), (), 6) == []
    assert join(registry, node("a")) is joined
    assert look_until(registry, 0, 15) == []
    assert look_until(registry, 15, 16) == ["a"]


def test_two_processes_cannot_be_one_node() -> None:
    registry = new_registry()
    join(registry, node("a"))
    with pytest.raises(NameTaken, match="node-1@a at tcp://10.0.0.1:7777 is node 'a'"):
        registry.join(node("a", "node-2"), (), 1)
    look_until(registry, 0, TTL)
    assert join(registry, node("a", "node-2"), TTL).peer == "node-2@a"


def test_a_node_that_leaves_takes_its_names_with_it() -> None:
    registry = new_registry()
    a, b = join(registry, node("a")), join(registry, node("b"))
    register(registry, "x", "worker-1@a")
    register(registry, "y", "controller-1@b")
    changes = registry.leave(a.epoch)
    registry.apply(changes, 1)
    assert [(change.kind, change.key) for change in changes] == [(Kind.NAME, "x"), (Kind.MEMBER, "a")]
    assert registry.leave(a.epoch) == []
    assert registry.members.all() == [b]
    assert registry.leases.state(a.epoch) is LeaseState.OVER
    assert join(registry, node("a", "node-2"), 1).epoch > b.epoch


def test_names_are_for_actors_on_members_and_end_with_these() -> None:
    registry = new_registry()
    with pytest.raises(LeaseLost, match="its node 'a' is not a member"):
        registry.register(named("x", "worker-1@a"), 0)
    with pytest.raises(LeaseLost, match="its node 'a' is not a member"):
        registry.reserve(named("x", "worker-1@a"), 0)
    a = join(registry, node("a"))
    assert register(registry, "x", "worker-1@a").lease == a.epoch


# Leases.


def test_a_silent_node_is_out_after_the_time_of_a_lease_with_its_names() -> None:
    registry = new_registry()
    a, b = join(registry, node("a")), join(registry, node("b"))
    register(registry, "x", "worker-1@a")
    registry.keep(b.epoch, FREE, 6)
    assert look_until(registry, 0, TTL - 0.001) == []
    assert look_until(registry, TTL - 0.001, TTL) == ["x", "a"]
    with pytest.raises(LeaseLost, match="the lease is over"):
        registry.keep(a.epoch, FREE, TTL)
    with pytest.raises(LeaseLost, match="not a member any more"):
        registry.join(node("a", epoch=a.epoch), (), TTL)
    assert registry.members.all() == [b]
    assert look_until(registry, TTL, 16) == ["b"]


def test_what_is_decided_and_not_stored_has_not_happened() -> None:
    registry = new_registry()
    a = join(registry, node("a"))
    for _ in range(2):
        assert [change.key for change in registry.leave(a.epoch)] == ["a"]
    assert registry.members.all() == [a]
    registry.keep(a.epoch, FREE, 1)


def test_free_resources_are_noted_but_neither_stored_nor_told() -> None:
    registry = new_registry()
    a = join(registry, node("a"))
    assert registry.keep(a.epoch, {"cpus": 1.0}, 1) == []
    found = registry.members.get("a")
    assert found is not None
    assert (found.free, found.epoch, found.revision) == ({"cpus": 1.0}, a.epoch, a.revision)
    assert registry.members.of(a.epoch) == found
    assert registry.leave(a.epoch)[0].key == "a"


def test_a_coordinator_that_was_stopped_reads_what_came_meanwhile_first() -> None:
    registry = new_registry()
    a, b = join(registry, node("a")), join(registry, node("b"))
    assert expire(registry, 60) == []
    registry.keep(a.epoch, FREE, 60)
    assert look_until(registry, 60, 60 + TTL / 2) == ["b"]
    assert registry.leases.state(b.epoch) is LeaseState.OVER


# A coordinator that starts again.


def test_with_a_store_everything_is_back_and_nothing_expires_for_the_time_of_a_lease() -> None:
    before = new_registry()
    a = join(before, node("a"))
    x = register(before, "x", "worker-1@a")
    after = Registry(Stored(term=6, records=stored(before)), TTL, now=100)
    assert after.names.lookup("x") == x
    assert after.members.all() == [a]
    assert after.leases.state(a.epoch) is LeaseState.UNSEEN
    with pytest.raises(NameTaken):
        after.register(named("x", "worker-1@a", actor=17), 100)
    assert register(after, "y", "worker-1@a", 100).epoch > first_revision(6)
    assert look_until(after, 100, 109) == []
    assert join(after, node("a", epoch=a.epoch), 109, [x]) == a
    assert after.leases.state(a.epoch) is LeaseState.HELD
    # The node may not have heard of it yet.
    assert [one.name for one in after.names.under(a.epoch)] == ["x", "y"]
    assert look_until(after, 109, 118) == []


def test_with_a_store_a_node_that_does_not_come_back_expires() -> None:
    before = new_registry()
    join(before, node("a"))
    register(before, "x", "worker-1@a")
    after = Registry(Stored(term=6, records=stored(before)), TTL, now=100)
    assert look_until(after, 100, 111) == ["x", "a"]


def test_without_a_store_nodes_bring_their_names_back() -> None:
    before = new_registry()
    a = join(before, node("a"))
    x = register(before, "x", "worker-1@a")
    after = Registry(Stored(term=6, forgot=True), TTL, now=100)
    assert join(after, node("a", epoch=a.epoch), 105, [x]) == a
    assert after.names.lookup("x") == x
    assert after.recovering_for(105) == 5
    for decide in (after.register, after.reserve):
        with pytest.raises(CoordinatorUnavailable, match="'y' may be the name of another actor"):
            decide(named("y", "worker-1@a"), 105)
    with pytest.raises(NameTaken):
        after.register(named("x", "worker-1@a", actor=17), 105)
    assert after.recovering_for(110) == 0
    assert register(after, "y", "worker-1@a", 110).epoch > x.epoch


def test_without_a_store_a_node_that_comes_too_late_has_lost_everything() -> None:
    before = new_registry()
    a = join(before, node("a"))
    x = register(before, "x", "worker-1@a")
    after = Registry(Stored(term=6, forgot=True), TTL, now=100)
    with pytest.raises(LeaseLost):
        after.join(node("a", epoch=a.epoch), (x,), 110)
    assert after.members.all() == []


@pytest.mark.parametrize("forgot", [False, True])
def test_a_name_that_went_to_another_actor_does_not_come_back(forgot: bool) -> None:
    before = new_registry()
    a, b = join(before, node("a")), join(before, node("b"))
    old = register(before, "x", "worker-1@a")
    before.apply(before.release(old.peer, old.actor), 0)
    new = register(before, "x", "worker-1@b")
    after = Registry(Stored(term=6, records=() if forgot else stored(before), forgot=forgot), TTL, now=100)
    join(after, node("b", epoch=b.epoch), 100, [new])
    join(after, node("a", epoch=a.epoch), 101, [old])
    assert after.names.lookup("x") == new


def test_a_newer_grant_that_the_store_has_lost_counts_while_nodes_come_back() -> None:
    before = new_registry()
    a, b = join(before, node("a")), join(before, node("b"))
    old = register(before, "x", "worker-1@a")
    records = stored(before)
    before.apply(before.release(old.peer, old.actor), 0)
    new = register(before, "x", "worker-1@b")
    after = Registry(Stored(term=6, records=records, forgot=True), TTL, now=100)
    join(after, node("b", epoch=b.epoch), 100, [new])
    assert after.names.lookup("x") == new
    join(after, node("a", epoch=a.epoch), 101, [old])
    assert after.names.lookup("x") == new


def test_a_newer_incarnation_that_the_store_has_lost_replaces_the_old_one() -> None:
    before = new_registry()
    a = join(before, node("a"))
    register(before, "x", "worker-1@a")
    after = Registry(Stored(term=6, records=stored(before), forgot=True), TTL, now=100)
    newer = join(after, node("a", "node-2", epoch=a.epoch + 3), 100)
    assert after.members.all() == [newer]
    assert after.names.get("x") is None
    assert (after.leases.state(a.epoch), after.leases.state(newer.epoch)) == (LeaseState.OVER, LeaseState.HELD)
    with pytest.raises(LeaseLost):
        after.join(node("a", epoch=a.epoch), (), 101)


def test_epochs_grow_also_where_the_clock_that_made_the_term_went_back() -> None:
    before = new_registry()
    a = join(before, node("a"))
    x = register(before, "x", "worker-1@a")
    for after in (
        Registry(Stored(term=2, records=stored(before)), TTL, now=100),
        Registry(Stored(term=2, forgot=True), TTL, now=100),
    ):
        join(after, node("a", epoch=a.epoch), 100, [x])
        assert register(after, "y", "worker-1@a", 110).epoch > x.epoch


@pytest.mark.parametrize("term", [0, -1, 1 << 31])
def test_a_term_that_leaves_no_room_for_epochs_is_refused(term: int) -> None:
    with pytest.raises(ValueError, match="a term lies between"):
        Registry(Stored(term), TTL, 0)


# Records as plain data.


def test_records_are_the_same_after_their_way_through_a_store() -> None:
    import json

    reserved = replace(named("x", "worker-1@a"), reserved=True)
    records: list[tuple[Kind, Record]] = [(Kind.MEMBER, node("a", epoch=7)), (Kind.NAME, reserved)]
    for kind, record in records:
        assert record_of(kind, json.loads(json.dumps(plain_of(record)))) == record


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {**plain_of(node("a")), "more": 1},
        {**plain_of(node("a")), "epoch": "1"},
        {**plain_of(node("a")), "epoch": True},
        {**plain_of(node("a")), "labels": []},
        {**plain_of(node("a")), "name": "a b"},
    ],
)
def test_other_data_is_no_record(plain: Any) -> None:
    with pytest.raises(ValueError, match="no record|does not belong|cannot name"):
        record_of(Kind.MEMBER, plain)


def test_a_change_says_what_it_is_about() -> None:
    registry = new_registry()
    (change,) = registry.join(node("a"), (), 0)
    assert change == Change(first_revision(5) + 1, Kind.MEMBER, "a", node("a", epoch=first_revision(5) + 1))


def test_the_names_of_a_program_go_on_with_another_node_when_its_own_leaves() -> None:
    registry = new_registry()
    a, b = join(registry, node("a")), join(registry, node("b", "node-2"))
    program = register(registry, "router", "controller-1@a")
    register(registry, "model", "worker-1@a")
    registry.apply(registry.leave(a.epoch), 0)
    assert registry.names.named("") == [replace(registry.names.lookup("router"), lease=b.epoch)]
    assert registry.names.lookup("router").epoch == program.epoch
    # Another one that it gives now is under the same lease.
    assert register(registry, "second", "controller-1@a").lease == b.epoch
    with pytest.raises(LeaseLost, match="its node 'a' is not a member"):
        register(registry, "third", "worker-1@a")
    # Without another node, they end.
    registry.apply(registry.leave(b.epoch), 0)
    assert registry.names.named("") == []
