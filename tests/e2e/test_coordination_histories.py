"""Under partitions, pauses, crashes and a store that fails, no two nodes serve one name, and no epoch is granted twice.

Seeded histories in virtual time, other ones each day; and each rule that is left out is found out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sim_coordination
from seeds import of_the_day
from sim_coordination import LEASE, Broken, Node, SharedStore, history

from aiodaft._protocol.coordination.records import History, HolderState, LeaseHolder, LeaseTable, View
from aiodaft._protocol.coordination.registry import NameTable, Registry
from aiodaft._runtime.coordination import coordinator
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft.testing import AutojumpLoop


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # Coordinators log that they cannot reach their store.
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def run(seed: int, *, stored: bool) -> int:
    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        return runner.run(history(seed, stored=stored))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("stored", [True, False])
def test_no_history_has_two_holders_of_a_name(stored: bool, count: int) -> None:
    seeds = of_the_day(count, 10_000)
    grants = sum(run(seed, stored=stored) for seed in seeds)
    assert grants > 2 * len(seeds)


Plant = Callable[[pytest.MonkeyPatch], None]


def no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_coordination, "SKEW", -10 * LEASE)


def counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    kept = LeaseHolder.kept
    patch.setattr(LeaseHolder, "kept", lambda self, epoch, good, sent_at: kept(self, epoch, good, sent_at + LEASE / 3))


def silence_is_taken_for_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "is_refused", lambda self, server: True)


def dead_coordinators_lift_fences(patch: pytest.MonkeyPatch) -> None:
    def unopposed(self: LeaseHolder, asked_at: float) -> None:
        if self.state(asked_at) is HolderState.FENCED:
            self.kept(self.epoch, LEASE, asked_at)

    patch.setattr(LeaseHolder, "unopposed", unopposed)


def fenced_nodes_claim_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "claims", lambda self, state: tuple(self.names.values()))


def store_takes_from_anyone(patch: pytest.MonkeyPatch) -> None:
    write = SharedStore.write
    patch.setattr(SharedStore, "write", lambda self, owner, changes: write(self, self.owner, changes))


def terms_repeat(patch: pytest.MonkeyPatch) -> None:
    take = SharedStore.take
    patch.setattr(SharedStore, "take", lambda self, owner: replace(take(self, owner), term=1))


def never_asks_whether_it_is_in_charge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_good_for", lambda self, came_at: LEASE)
    patch.setattr(coordinator, "_CONFIRMED", 1e9)


def answers_without_storing(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: Coordinator, changes: Any, now: float) -> None:
        self._confirmed_at = now

    patch.setattr(Coordinator, "_commit", commit)


def forgets_the_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "recovering_for", lambda self, now: 0.0)


def expires_at_once_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    begin = LeaseTable.begin
    patch.setattr(
        LeaseTable, "begin", lambda self, epoch, now, seen: begin(self, epoch, now if seen else now - LEASE, seen=seen)
    )


def expires_too_early(patch: pytest.MonkeyPatch) -> None:
    make = LeaseTable.__init__
    patch.setattr(LeaseTable, "__init__", lambda self, ttl, now: make(self, ttl / 2, now))


def keeps_leases_that_are_over(patch: pytest.MonkeyPatch) -> None:
    keep = LeaseTable.keep
    patch.setattr(
        LeaseTable, "keep", lambda self, epoch, now: keep(self, epoch, now) if epoch in self._leases else None
    )
    patch.setattr(Registry, "keep", lambda self, epoch, free, now: self.leases.keep(epoch, now) or [])


def deletes_without_comparing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Registry,
        "release_name",
        lambda self, name, epoch: self._changes(gone=[held] if (held := self.names.get(name)) is not None else []),
    )


def names_outlive_their_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NameTable, "under", lambda self, lease: [])


def watchers_miss_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    take = View.take
    patch.setattr(View, "take", lambda self, batch: take(self, replace(batch, whole=False)))


def watchers_miss_a_change(patch: pytest.MonkeyPatch) -> None:
    since = History.since

    def late(self: History, revision: int, kind: Any, prefix: str) -> Any:
        found = since(self, revision, kind, prefix)
        return found[1:] if found else found

    patch.setattr(History, "since", late)


def watchers_hear_everything_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(View, "_is_news", lambda self, change: True)


PLANTS: list[Plant] = [
    no_fence, counts_from_the_answer, silence_is_taken_for_death, dead_coordinators_lift_fences,
    fenced_nodes_claim_names, store_takes_from_anyone, terms_repeat,
    never_asks_whether_it_is_in_charge, answers_without_storing, forgets_the_restart,
    expires_at_once_after_a_restart, expires_too_early, keeps_leases_that_are_over,
    deletes_without_comparing, names_outlive_their_lease, watchers_miss_what_is_gone, watchers_miss_a_change,
    watchers_hear_everything_again,
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_rule_that_is_left_out_is_found_out(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken):
        for seed in range(1000):
            run(seed, stored=seed % 2 == 0)
