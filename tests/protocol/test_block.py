"""Blocks of torch.distributed: the members lost to each, and the variables in the environment."""

from __future__ import annotations

import pytest

from aiodaft._protocol.groups.meeting import Left, Others, address_variables, torchrun_variables
from aiodaft._protocol.ids import PeerId
from aiodaft.exceptions import ActorDied


def others() -> Others:
    return Others("g@c", ["A-1[0]", "A-1[1]", "A-1[2]"])


def test_a_member_that_leaves_at_the_end_is_not_lost() -> None:
    known = others()
    assert not known.hear(1, Left())
    assert known.lost is None


@pytest.mark.parametrize(
    ("left", "kind", "said"),
    [
        (Left("ValueError: bad"), RuntimeError, "A-1[1], rank 1 of g@c, left by an error: ValueError: bad"),
        (Left(gone=True), ActorDied, "A-1[1], rank 1 of g@c, was stopped"),
        (ActorDied("A-1[1] was killed"), ActorDied, "A-1[1] was killed"),
    ],
)
def test_the_first_one_that_is_lost_is_named(left: Left | ActorDied, kind: type[Exception], said: str) -> None:
    known = others()
    assert known.hear(1, left)
    assert known.hear(2, Left("KeyError: later"))
    assert isinstance(known.lost, kind)
    assert said in str(known.lost)
    if isinstance(left, ActorDied):
        assert left.__notes__ == ["this was A-1[1], rank 1 of g@c"]


def test_one_that_leaves_because_of_another_is_not_to_blame_and_lets_go_of_those_that_wait_for_it() -> None:
    known = others()
    assert known.hear(2, Left("ActorDied: A-1[1] was killed", follows=True))
    assert known.lost is None
    assert known.hear(1, ActorDied("A-1[1] was killed"))
    assert isinstance(known.lost, ActorDied)


@pytest.mark.parametrize(
    ("lost", "inside", "broken", "follows"),
    [
        (False, True, True, False),  # its own error of torch
        (False, False, False, False),
        (True, True, True, True),
        (True, True, False, False),  # an error of its own, while another one was lost
        (True, False, False, True),  # the block cannot begin without the lost one
    ],
)
def test_an_error_follows_from_a_loss_if_torch_failed_or_the_block_had_not_begun(
    lost: bool, inside: bool, broken: bool, follows: bool
) -> None:
    known = others()
    if lost:
        known.hear(1, Left(gone=True))
    left = known.leave(ValueError("bad"), inside=inside, broken=broken)
    assert left == Left("ValueError: bad", follows=follows)


def test_the_variables_of_torchrun_count_the_ranks_of_each_node() -> None:
    processes = [PeerId(name) for name in ("w1@a", "w2@b", "w3@a", "w4@b", "w5@b")]
    found = [torchrun_variables(rank, processes) | address_variables("10.0.0.1", 4711, "eth0") for rank in range(5)]
    assert [one["RANK"] for one in found] == ["0", "1", "2", "3", "4"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1", "1", "2"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "3", "2", "3", "3"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("5", "10.0.0.1", "4711")}
    assert {one[f"{of}_SOCKET_IFNAME"] for one in found for of in ("GLOO", "NCCL")} == {"eth0"}
