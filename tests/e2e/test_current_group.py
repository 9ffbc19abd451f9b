"""The group as its members know it: rank, size, axes, epoch and the other members."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from actors import Echo
from inside import peer_of
from seated import Founder, Leaver, Loner, Passer, Plain, Seated
from supervised import AT_ONCE

import aiodaft
from aiodaft import Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")

MADE = "are being made: ask for them in the first call, or later"


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_member_knows_its_rank_size_and_axes_from_its_constructor_on(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Seated, axes={"dp": 2, "tp": 2})
    assert dict(group.axes) == {"dp": 2, "tp": 2}
    for rank, (early, now, in_thread) in enumerate(
        zip(
            await group.all(Seated.early), await group.all(Seated.look), await group.all(Seated.look_in_thread),
            strict=True,
        )
    ):  # fmt: skip
        assert len(early) == 2
        for seen in (*early, now, in_thread):
            assert (seen.id, seen.epoch, seen.rank, seen.size) == (group.id, 1, rank, 4)
            assert (seen.axes, seen.coords) == (dict(group.axes), {"dp": rank // 2, "tp": rank % 2})
        assert all(MADE in str(seen.members) for seen in early)
        assert now.members == in_thread.members == tuple(group)
    # The group that the constructor has asked for knows the members, too.
    assert await group.all(Seated.kept) == [(4, True, 4)] * 4
    assert group.id.startswith("Seated-group-")


async def test_a_member_knows_its_rank_while_it_is_left(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    await rt.stop(await rt.group(2, Leaver, str(tmp_path)))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


async def test_members_call_each_other_without_the_controller(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Seated)
    assert await group.all(Seated.next_rank) == [1, 2, 0]
    assert (await group[0].look()).axes == {}


async def test_along_an_axis_are_the_members_that_differ_only_there(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Seated, axes={"dp": 2, "tp": 2})
    rows, columns = await group.all(Seated.look, "tp"), await group.all(Seated.look, "dp")
    assert [seen.members for seen in rows] == [(group[0], group[1])] * 2 + [(group[2], group[3])] * 2
    assert [seen.members for seen in columns] == [(group[0], group[2]), (group[1], group[3])] * 2
    assert [(seen.rank, seen.size, seen.axes) for seen in rows] == [(rank, 2, {"tp": 2}) for rank in (0, 1, 0, 1)]
    assert [seen.rank for seen in columns] == [0, 0, 1, 1]
    # One id for all members of a part, and another one for each part.
    assert [seen.id.removeprefix(group.id) for seen in rows] == ["/tp[dp=0]"] * 2 + ["/tp[dp=1]"] * 2
    assert len({seen.id for seen in (*rows, *columns)}) == 4
    assert [seen.rank for seen in await group.all(Seated.look, "dp", "tp")] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the group has no axis 'pp': it has 'dp', 'tp'"):
        await group[0].look("pp")


async def test_a_restarted_member_has_its_rank_again(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart(backoff=AT_ONCE)).group(2, Seated)
    with pytest.raises(aiodaft.ActorDied):
        await group[1].die()
    assert [(seen.rank, seen.size) for seen in await group[1].early()] == [(1, 2)] * 3
    assert (await group[1].look()).members == tuple(group)


async def test_after_resize_every_member_knows_the_new_epoch_at_the_next_call(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Seated, axes={"dp": 2})
    old = group[0]
    await group.resize(4)
    assert (group.epoch, dict(group.axes)) == (2, {"dp": 4})
    for rank, seen in enumerate(await group.all(Seated.look)):
        assert (seen.epoch, seen.rank, seen.size, seen.axes) == (2, rank, 4, {"dp": 4})
        assert seen.members == tuple(group)
    # An object of an earlier epoch says that it is not current, and stays as it was.
    assert await old.kept() == (2, False, 2)
    assert (await group[3].early())[0].epoch == 2
    await group.resize(1)
    seen = await group[0].look()
    assert (seen.epoch, seen.size, seen.axes, seen.members) == (3, 1, {"dp": 1}, (old,))
    await group.resize(1)
    assert group.epoch == 3


async def test_axes_keep_their_places_when_the_first_one_grows(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Seated, axes={"dp": 1, "tp": 2})
    with pytest.raises(ValueError, match=r"axes dp=1 x tp=2 do not fit 3 members: give the new ones"):
        await group.resize(3)
    await group.resize(3, axes={"dp": 3})
    assert [seen.coords for seen in await group.all(Seated.look)] == [{"dp": 0}, {"dp": 1}, {"dp": 2}]
    with pytest.raises(ValueError, match="axes dp=2 x tp=2 have 4 places, for 3 members"):
        rt.group(3, Seated, axes={"dp": 2, "tp": 2})
    with pytest.raises(TypeError, match=r"axes: 'dp': 1.5 is not a name with a whole number"):
        rt.group(1, Seated, axes={"dp": 1.5})  # type: ignore[arg-type]  # the mistake under test


async def test_a_member_that_is_restarted_while_the_group_changes_knows_the_change_when_it_is_up(
    rt: aiodaft.Runtime, fifo: Path
) -> None:
    group = await rt.on(restart=Restart(backoff=AT_ONCE)).group(2, Seated, str(fifo))
    with pytest.raises(aiodaft.ActorDied):
        await group[0].die()
    back = group[0].look()
    # Its hook waits for the gate, while the group grows.
    await group.resize(3)
    assert not back.done()
    await asyncio.to_thread(fifo.write_text, "")
    seen = await back
    assert (seen.epoch, seen.rank, seen.size, seen.members) == (group.epoch, 0, 3, tuple(group))


async def test_a_resize_that_fails_leaves_the_group_and_what_its_members_know(rt: aiodaft.Runtime) -> None:
    group = await rt.on(gpus=1).group(2, Seated)
    with pytest.raises(aiodaft.exceptions.InsufficientResources):
        await group.resize(5)
    assert (group.epoch, len(group)) == (1, 2)
    assert {(seen.epoch, seen.size) for seen in await group.all(Seated.look)} == {(1, 2)}
    await rt.stop(group)


async def test_resizes_of_one_group_happen_one_after_the_other(rt: aiodaft.Runtime) -> None:
    group = await rt.group(1, Seated)
    await asyncio.gather(group.resize(3), group.resize(2), group.resize(4))
    assert (len(group), group.epoch) == (4, 4)
    assert [seen.rank for seen in await group.all(Seated.look)] == [0, 1, 2, 3]


async def test_a_group_keeps_its_id_in_another_process(rt: aiodaft.Runtime) -> None:
    group, passer = await rt.group(2, Seated, axes={"dp": 2}), await rt.spawn(Passer)
    assert await passer.name(group) == (group.id, 1, {"dp": 2}, group.id)
    assert group[:1].id == f"{group.id}/0:1:1"
    other = await rt.group(2, Seated)
    assert other.id != group.id


async def test_a_copy_follows_the_changes_of_its_owner(rt: aiodaft.Runtime) -> None:
    group, passer = await rt.group(2, Seated, axes={"dp": 2}), await rt.spawn(Passer)
    assert await passer.keep(group) == 1
    await group.resize(3)
    assert await passer.waits_for_size(3) == (2, {"dp": 3}, [0, 1, 2])
    await group.resize(1)
    assert await passer.waits_for_size(1) == (3, {"dp": 1}, [0])
    assert await passer.shown() == "<Group of 1 Seated>"
    # Another copy in that process is the same, and one that comes back is the group's own.
    assert await passer.keep(group) == 3
    echo = await rt.spawn(Echo)
    back: Any = await echo.echo([group])
    await group.resize(2)
    assert len(back[0]) == 2
    # Nothing is asked of the owner when no copy is left.
    await passer.drop()
    await rt.stop(echo)
    while any(call.label.endswith("roster_after") for call in peer_of(rt).host.calls()):
        await asyncio.sleep(0)


async def test_a_copy_that_cannot_reach_the_owner_says_that_it_stays_as_it_was(rt: aiodaft.Runtime) -> None:
    founder, passer = await rt.spawn(Founder), await rt.spawn(Passer)
    await founder.hand_over(passer)
    assert await passer.waits_for_size(2) == (1, {}, [0, 1])
    await rt.kill(founder)
    while await passer.shown() == "<Group of 2 Seated>":
        pass
    assert await passer.shown() == "<Group of 2 Seated, as it was at epoch 1>"


async def test_members_of_hosted_classes_know_their_group(rt: aiodaft.Runtime) -> None:
    services = await rt.group(2, Plain, axes={"dp": 2})
    assert await services.all(Plain.neighbour) == [(0, "Service"), (1, "Service")]


async def test_the_group_of_an_actor_has_members_that_know_it(rt: aiodaft.Runtime) -> None:
    founder = await rt.spawn(Founder)
    seen = await founder.found()
    assert [(one.rank, one.size, len(one.members)) for one in seen] == [(0, 2, 2), (1, 2, 2)]


async def test_members_in_one_process_have_each_their_own_rank(rt: aiodaft.Runtime) -> None:
    host = await rt.spawn(Loner)
    group = await rt.on(with_=host).group(3, Seated)
    assert [seen.rank for seen in await group.all(Seated.look)] == [0, 1, 2]
    assert [seen.rank for seen in await group.all(Seated.look_in_thread)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"Loner-\d+ is no member of a group: make it by `rt.group"):
        await host.look()


async def test_outside_of_a_member_the_error_says_so(rt: aiodaft.Runtime) -> None:
    with pytest.raises(RuntimeError, match="no code of an actor runs here"):
        aiodaft.current_group()
    group = await rt.group(1, Seated)
    with pytest.raises(aiodaft.exceptions.SerializationError, match="belongs to its member: pass the `Group` instead"):
        await group[0].give_away()
