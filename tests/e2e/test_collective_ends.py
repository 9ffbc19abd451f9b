"""Every member of a collective hears that another one does not take part any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from parting import Parting
from supervised import AT_ONCE

import aiodaft
from aiodaft import ActorDied, CallCancelled, Restart

# Brings torch.
PRELOAD = ("parting",)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("method", [Parting.gather_and_die, Parting.gather_and_die_in_thread])
async def test_a_call_of_a_group_is_not_made_again_when_another_call_has_failed(
    rt: aiodaft.Runtime, method: Any
) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Parting)
    refs = group.each(method, [True, False, False])
    with pytest.raises(ValueError, match="a bad batch"):
        await refs[0]
    for ref in refs[1:]:
        with pytest.raises((ActorDied, CallCancelled), match="SIGKILL|bad batch"):
            await ref
    done = await asyncio.gather(*(group[rank].until_done([0], 1, rank) for rank in range(3)))
    assert done == [[[(1, rank) for rank in range(3)]]] * 3
    assert await group.all(Parting.meetings) == [0, 0, 0]


async def test_members_that_are_called_as_one_do_not_wait_for_one_that_has_failed(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Parting, axes={"dp": 2, "tp": 2})
    replicas = group.along("dp")
    for failing in (0, 1):
        with pytest.raises((ValueError, CallCancelled), match="a bad batch"):
            await replicas.any(Parting.gather_in_replica, failing)
    assert await replicas.any(Parting.gather_in_replica, None) == [0, 1]
