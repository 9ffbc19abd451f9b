"""The outer steps of `diloco.py`, and the members that take them: the controller's part."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from diloco_member import Change, Member, add_up
from diloco_plan import Plan
from torch import Tensor

import aiodaft
from aiodaft.collectives import OfAll, Survivors, among_survivors

T = TypeVar("T")


async def of_the_living(refs: Iterable[aiodaft.Ref[T]]) -> list[T]:
    """The results of the members that have not died."""
    results = await asyncio.gather(*refs, return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException) and not isinstance(error, aiodaft.ActorDied):
            raise error
    return [result for result in results if not isinstance(result, BaseException)]


class Sent(NamedTuple):
    """Changes under way: by these members, of these vectors."""

    members: list[Member]
    due: tuple[int, ...]
    changes: aiodaft.Refs[Change]


class Training:
    """The algorithm. It moves no data: vectors go from member to member."""

    def __init__(self, group: aiodaft.Group[Member], plan: Plan) -> None:
        self.group, self.plan = group, plan
        self.outer_steps, self.digest = 0, ""
        self.sent: Sent | None = None  # of the last outer step, if its average comes with this one

    async def outer_step(self) -> tuple[int, ...]:
        """Inner steps, and an outer step; returns the ranks of the members whose changes are in it."""
        plan, step = self.plan, self.outer_steps
        begin, due = step * plan.steps, plan.due(step)
        end = begin + plan.steps
        trained = self.group.all(Member.train, range(begin, end - plan.overlap))
        sent: Sent | None = Sent(list(self.group), due, self.group.all(Member.change, due))
        # This call is made before the average exists: members take these steps while the changes travel.
        overlapped = self.group.all(Member.train, range(end - plan.overlap, end))
        self.outer_steps += 1
        if plan.eager:
            sent, self.sent = self.sent, sent
        ranks = () if sent is None else await self.finish(sent)
        await of_the_living([*trained, *overlapped])
        return ranks

    async def finish(self, sent: Sent) -> tuple[int, ...]:
        """Average changes, and have all members of now take an outer step by them."""
        try:
            ranks, sums = await self.combine(sent.changes)
        except aiodaft.ActorDied:
            if not self.plan.eager:
                raise
            return ()  # all that had changes of the last outer step have died, and those that have joined have none
        place = {sent.members[rank]: index for index, rank in enumerate(ranks)}
        # A member that has joined meanwhile gets the sum from another one.
        taken = [member.take(sums[place.get(member, 0)], len(ranks), sent.due) for member in self.group]
        digests = set(await of_the_living(taken))
        if len(digests) != 1:
            raise AssertionError(f"after outer step {self.outer_steps}, members share different states: {digests}")
        (self.digest,) = digests
        return ranks

    async def combine(self, changes: aiodaft.Refs[Change]) -> Survivors[Tensor]:
        """The sum of the changes, without those of members that have died."""
        how: dict[str, Any] = {"op": OfAll(add_up), "algorithm": "exchange"} if self.plan.codec else {}
        return await among_survivors(aiodaft.all_reduce, changes, **how)

    async def change_members(self, count: int) -> None:
        """Leave out the dead, and have `count` members. If one dies meanwhile, this may have to be called again."""
        with suppress(aiodaft.ActorDied, aiodaft.exceptions.OwnerDied, aiodaft.exceptions.PeerLost):
            await self.group.heal(count, prepare=self.catch_up)

    async def catch_up(self, new: list[Member]) -> None:
        state = self.group.any(Member.state)  # of one that lives
        await asyncio.gather(*(member.join(aiodaft.typing.lazy(state)) for member in new))

    async def received(self) -> int:
        """The bytes of tensors that the members have received from each other."""
        return sum(await of_the_living(self.group.all(Member.received)))
