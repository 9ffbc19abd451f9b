"""A node counts its lease from the moment it asked, and stops in time."""

from __future__ import annotations

from typing import Final

import pytest

from aiodaft._protocol.coordination.records import HolderState, LeaseHolder, LeaseTable

TTL: Final = 8.0
SKEW: Final = 1.0


def new_holder() -> LeaseHolder:
    holder = LeaseHolder(SKEW)
    holder.sent(0.0)
    holder.joined(5, TTL, TTL, sent_at=0.0)
    return holder


def test_a_node_without_a_lease_may_do_nothing() -> None:
    assert LeaseHolder(SKEW).state(0.0) is HolderState.OUTSIDE


def test_a_node_fences_itself_before_its_lease_is_over_for_others() -> None:
    holder = new_holder()
    assert holder.state(6.9) is HolderState.HOLDING
    assert holder.state(7.0) is HolderState.FENCED
    assert holder.epoch == 5


def test_an_answer_counts_from_the_moment_of_asking() -> None:
    holder = new_holder()
    holder.sent(2.0)
    holder.kept(5, TTL, sent_at=2.0)
    assert holder.state(8.9) is HolderState.HOLDING
    assert holder.state(9.0) is HolderState.FENCED
    # It came too late to be of use.
    holder.kept(5, TTL, sent_at=3.0)
    assert holder.state(10.0) is HolderState.FENCED
    holder.kept(5, TTL, sent_at=4.0)
    assert holder.state(10.0) is HolderState.HOLDING


def test_a_coordinator_that_is_less_sure_gives_less() -> None:
    holder = new_holder()
    holder.kept(5, 6.5, sent_at=2.0)
    assert holder.state(7.4) is HolderState.HOLDING
    assert holder.state(7.5) is HolderState.FENCED


def test_an_older_answer_takes_no_time_away() -> None:
    holder = new_holder()
    holder.kept(5, TTL, sent_at=4.0)
    holder.kept(5, TTL, sent_at=2.0)
    assert holder.state(10.9) is HolderState.HOLDING


def test_a_node_whose_lease_was_ended_joins_again_with_another_epoch() -> None:
    holder = new_holder()
    holder.lost(4)
    assert holder.state(1.0) is HolderState.HOLDING
    holder.lost(5)
    holder.lost(5)
    assert holder.state(1.0) is HolderState.OUTSIDE
    holder.kept(5, TTL, sent_at=1.0)
    assert holder.state(1.0) is HolderState.OUTSIDE
    holder.joined(9, TTL, TTL, sent_at=1.0)
    holder.kept(5, TTL, sent_at=3.0)
    assert holder.state(8.0) is HolderState.FENCED
    holder.lost(9)
    assert holder.state(8.0) is HolderState.OUTSIDE


def test_a_new_lease_has_the_time_of_its_own_join_only() -> None:
    holder = new_holder()
    holder.kept(5, TTL, sent_at=4.0)
    holder.lost(5)
    holder.joined(9, 5.0, TTL, sent_at=4.0)
    assert holder.state(7.9) is HolderState.HOLDING
    assert holder.state(8.0) is HolderState.FENCED


def test_a_node_that_comes_back_with_its_epoch_goes_on_and_cannot_have_two() -> None:
    holder = new_holder()
    assert holder.state(7.0) is HolderState.FENCED
    holder.joined(5, TTL, TTL, sent_at=7.0)
    assert holder.state(13.9) is HolderState.HOLDING
    with pytest.raises(ValueError, match="JOINED cannot happen in"):
        holder.joined(6, TTL, TTL, sent_at=1.0)


def test_keepalives_go_out_four_times_in_a_lease() -> None:
    holder = new_holder()
    times = []
    now = 0.0
    while holder.state(now) is HolderState.HOLDING:
        now = holder.get_timer()
        times.append(now)
        holder.sent(now)
    assert times == [2.0, 4.0, 6.0, 7.0]
    # A fenced node goes on asking.
    assert holder.get_timer() == 9.0


def test_a_coordinator_that_does_not_run_can_end_no_lease() -> None:
    holder = new_holder()
    holder.unopposed(6.0)
    assert holder.state(12.9) is HolderState.HOLDING
    assert holder.state(13.0) is HolderState.FENCED
    # Nodes of a job end when nothing has answered for a lease.
    assert [holder.is_alone(6.9), holder.is_alone(7.0)] == [False, True]


def test_that_no_coordinator_runs_any_more_lifts_no_fence() -> None:
    holder = new_holder()
    holder.unopposed(7.0)
    assert holder.state(7.0) is HolderState.FENCED
    holder.kept(5, TTL, sent_at=7.5)
    assert holder.state(7.5) is HolderState.HOLDING


def test_a_coordinator_that_was_stopped_ends_no_lease_before_it_has_read_what_came_meanwhile() -> None:
    table = LeaseTable(TTL, now=0.0)
    table.begin(5, 0.0, seen=True)
    assert table.expired(2.0) == []
    # It did not run for a while, in which the lease ended by its clock.
    assert table.expired(20.0) == []
    assert table.expired(23.9) == []
    assert table.expired(24.0) == [5]
