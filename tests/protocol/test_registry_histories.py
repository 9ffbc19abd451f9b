"""Any history of names, nodes, leases, restarts and watchers agrees with dictionaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiodaft._protocol.coordination.records import Change, Kind, Member, NamedActor, Record, View
from aiodaft._protocol.coordination.registry import Registry, Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft.exceptions import LeaseLost, NameTaken

TTL: Final = 10.0
NODES: Final = ("", "a", "b")
nodes = st.sampled_from(NODES)
names = st.sampled_from(("x", "y", "z.1"))
actors = st.sampled_from((ActorId(16), ActorId(17)))


@dataclass
class Known:
    """A dictionary's knowledge of a member."""

    epoch: int
    deadline: float


def process(node: str) -> PeerId:
    return PeerId(f"worker-1@{node}" if node else "worker-1")


def wanted(name: str, node: str, actor: ActorId, epoch: int = 0) -> NamedActor:
    return NamedActor(name, process(node), actor, "Model-1", ("m.Model",), epoch=epoch)


def member(node: str, epoch: int = 0) -> Member:
    return Member(node, PeerId(f"node-1@{node}"), "tcp://10.0.0.1:7777", epoch=epoch)


class AnyHistory(RuleBasedStateMachine):
    """One registry after the other, and the dictionaries that predict it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.term = 0.0, 1
        self.registry = Registry(Stored(self.term), TTL, self.now)
        # Name: node, actor, epoch.
        self.names: dict[str, tuple[str, ActorId, int]] = {}
        self.members: dict[str, Known] = {}
        self.newest = 0
        self.view = View(Kind.NAME)
        self.heard: dict[str, object] = {}

    def apply(self, changes: list[Change]) -> None:
        self.registry.apply(changes, self.now)

    def new(self, epoch: int) -> int:
        assert epoch > self.newest
        self.newest = epoch
        return epoch

    def forget(self, node: str) -> None:
        del self.members[node]
        self.names = {name: held for name, held in self.names.items() if held[0] != node}

    @rule(name=names, node=nodes, actor=actors)
    def register(self, name: str, node: str, actor: ActorId) -> None:
        if node and node not in self.members:
            with pytest.raises(LeaseLost):
                self.registry.register(wanted(name, node, actor), self.now)
        elif name in self.names and self.names[name][:2] != (node, actor):
            with pytest.raises(NameTaken):
                self.registry.register(wanted(name, node, actor), self.now)
        else:
            self.apply(self.registry.register(wanted(name, node, actor), self.now))
            granted = self.registry.names.lookup(name)
            if name not in self.names:
                self.names[name] = (node, actor, self.new(granted.epoch))

    @rule(node=nodes, actor=actors)
    def release(self, node: str, actor: ActorId) -> None:
        self.apply(self.registry.release(process(node), actor))
        self.names = {name: held for name, held in self.names.items() if held[:2] != (node, actor)}

    @rule(name=names, data=st.data())
    def release_name(self, name: str, data: st.DataObject) -> None:
        held = self.names.get(name)
        epoch = data.draw(st.sampled_from([1, self.newest, *([] if held is None else [held[2]])]))
        self.apply(self.registry.release_name(name, epoch))
        if held is not None and held[2] == epoch:
            del self.names[name]

    @rule(node=st.sampled_from(NODES[1:]))
    def join(self, node: str) -> None:
        self.apply(self.registry.join(member(node), (), self.now))
        joined = self.registry.members.get(node)
        assert joined is not None
        if node not in self.members:
            self.members[node] = Known(self.new(joined.epoch), self.now + TTL)
        self.members[node].deadline = self.now + TTL

    @precondition(lambda self: self.members)
    @rule(data=st.data(), rejoin=st.booleans())
    def keep(self, data: st.DataObject, rejoin: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.members)))
        known = self.members[node]
        if rejoin:
            self.apply(self.registry.join(member(node, known.epoch), (), self.now))
        else:
            self.apply(self.registry.keep(known.epoch, {}, self.now))
        known.deadline = self.now + TTL

    @rule(node=st.sampled_from(NODES[1:]), epoch=st.integers(1, 5))
    def keep_what_is_over(self, node: str, epoch: int) -> None:
        with pytest.raises(LeaseLost):
            self.registry.keep(epoch, {}, self.now)
        with pytest.raises(LeaseLost):
            self.registry.join(member(node, epoch), (), self.now)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.members)))
        self.apply(self.registry.leave(self.members[node].epoch))
        self.forget(node)

    @rule(seconds=st.sampled_from((0.5, 4.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.registry.leases.next_look())
            self.apply(self.registry.expire(self.now))
        for node in [node for node, known in self.members.items() if known.deadline <= self.now]:
            self.forget(node)

    @rule(forgot=st.booleans())
    def restart(self, forgot: bool) -> None:
        """With the stored records; or without, and all members come back at once."""
        before, self.term = self.registry, self.term + 1
        records: tuple[Record, ...] = (*before.names.all(), *before.members.all())
        self.registry = Registry(Stored(self.term, () if forgot else records, forgot), TTL, self.now)
        for node, known in self.members.items():
            known.deadline = self.now + TTL
            if forgot:
                held = tuple(before.names.under(known.epoch))
                self.apply(self.registry.join(member(node, known.epoch), held, self.now))
        if forgot:
            # Names without a lease are an embedded runtime's, which does not outlive its coordinator.
            self.names = {name: held for name, held in self.names.items() if held[0]}
            self.now += TTL
            for known in self.members.values():
                self.apply(self.registry.keep(known.epoch, {}, self.now))
                known.deadline = self.now + TTL
            self.apply(self.registry.expire(self.now))

    @rule()
    def look(self) -> None:
        batch = self.registry.news(Kind.NAME, "", self.view.revision)
        for change in () if batch is None else self.view.take(batch):
            assert self.heard.get(change.key) != change.record
            self.heard[change.key] = change.record
        assert {key for key, record in self.heard.items() if record is not None} == self.names.keys()

    @invariant()
    def it_agrees(self) -> None:
        found = {one.name: (one.peer, one.actor, one.epoch) for one in self.registry.names.named("")}
        assert found == {name: (process(node), *rest) for name, (node, *rest) in self.names.items()}
        assert {one.name: one.epoch for one in self.registry.members.all()} == {
            node: known.epoch for node, known in self.members.items()
        }
        for node, known in self.members.items():
            held = {one.name for one in self.registry.names.under(known.epoch)}
            assert held == {name for name, (where, *_) in self.names.items() if where == node}


def test_any_history_agrees_with_dictionaries() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(deadline=None, derandomize=True, database=None, max_examples=60, stateful_step_count=40),
    )
