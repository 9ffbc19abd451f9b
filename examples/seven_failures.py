"""Seven failures of torch.distributed with gloo: their outcomes there, and with members of a group of aiodaft.

    python examples/seven_failures.py

The programs of gloo are the methods of `gloo_twins.Twin`; `Member` has the same by the group. All are run here.
"""

import asyncio
import os
import re
import signal
import tempfile
from typing import Any

import torch
from gloo_twins import Twin

import aiodaft

TIMED_OUT = re.compile(r"[Tt]imed out waiting")  # the message of gloo

# The method that both have, the numbers of ranks of gloo and of members that run it, and the right result of each.
FAILURES: list[tuple[str, str, int, int, Any]] = [
    ("two all_reduce in opposite orders", "opposite_orders", 2, 2, (3.0, 300.0)),
    ("all_reduce of different shapes", "different_shapes", 2, 2, None),
    ("overlapping groups, opposite orders", "overlapping_groups", 3, 4, None),
    ("both send before they receive", "both_send_first", 2, 2, None),
    ("10 numbers sent, 6 received", "too_little_room", 2, 2, None),
    ("a member dies in 1 of 3 all_reduce", "a_peer_dies", 3, 3, None),
    ("a pipeline in a stuck order", "stuck_pipeline", 2, 2, None),
]
AXES = {2: {"row": 2}, 3: {"row": 3}, 4: {"row": 2, "column": 2}}


class Member(aiodaft.Actor, restart=aiodaft.Restart(backoff=aiodaft.Backoff(base=0.01))):
    """A call of a collective does not wait: make the calls that belong together, then await them. A result of None is
    right."""

    @property
    def group(self) -> aiodaft.typing.CurrentGroup["Member"]:
        return aiodaft.current_group()  # as it is now: with the one that was started again

    @property
    def other(self) -> int:
        return 1 - self.group.rank

    @aiodaft.method
    async def opposite_orders(self) -> tuple[float, float]:
        values = {"loss": 1.0 + self.group.rank, "gradient": 100.0 * (self.group.rank + 1)}
        keys = list(values) if self.group.rank == 0 else list(values)[::-1]
        sums = {key: self.group.all_reduce(values[key], key=key) for key in keys}
        return await sums["loss"], await sums["gradient"]

    @aiodaft.method
    async def different_shapes(self) -> None:
        await self.group.all_reduce(torch.ones(10 if self.group.rank else 6))

    @aiodaft.method
    async def overlapping_groups(self) -> None:
        """Rows and columns of a grid: each member begins with the one that its neighbour ends with."""
        axes = ("row", "column") if self.group.rank in (0, 3) else ("column", "row")
        sums = [self.group.along(axis).all_reduce(1) for axis in axes]
        assert await asyncio.gather(*sums) == [2, 2]

    @aiodaft.method
    async def both_send_first(self) -> None:
        await self.group.send(torch.full([1000], float(self.group.rank)), to=self.other)
        assert (await self.group.recv(source=self.other)).mean() == self.other

    @aiodaft.method
    async def too_little_room(self) -> None:
        if self.group.rank == 0:
            await self.group.send(torch.ones(10), to=1)
        else:
            assert len(await self.group.recv(source=0)) == 10

    @aiodaft.method
    async def a_peer_dies(self, dies: bool) -> int:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.group.all_reduce(1)

    @aiodaft.method
    async def stuck_pipeline(self) -> None:
        """Stages 0 and 2 are at rank 0, stage 1 is at rank 1; each runs the first task of its schedule."""
        sent, expected = ("F1", "F0") if self.group.rank == 0 else ("F0", "F1")
        await self.group.send(torch.ones(1000), to=self.other, tag=sent)
        await self.group.recv(source=self.other, tag=expected)


async def by_gloo(rt: aiodaft.Runtime, method: str, count: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with rt.on(restart="temporary").group(count, Twin) as twins:
            calls = twins.all(getattr(Twin, method), f"{folder}/store")
            return await asyncio.gather(*calls, return_exceptions=True)


async def by_members(rt: aiodaft.Runtime, method: str, count: int) -> list[Any]:
    async with rt.group(count, Member, axes=AXES[count]) as members:
        if method != "a_peer_dies":
            return await asyncio.gather(*members.all(getattr(Member, method)), return_exceptions=True)
        ends = []
        for turn in range(3):
            sums = members.each(Member.a_peer_dies, [False, turn == 1, False])
            ends.append(await asyncio.gather(*sums, return_exceptions=True))
        return [sum(end[0] == count for end in ends), *ends[1][1:]]


def outcome(ends: list[Any], right: Any) -> str:
    """The outcome, by the result or the error of each rank."""
    errors = [end for end in ends if isinstance(end, BaseException)]
    if any(isinstance(error, aiodaft.ActorDied) and error.signal == "SIGABRT" for error in errors):
        return "a process aborts"
    if any(TIMED_OUT.search(str(error)) for error in errors):
        return "stuck until the timeout"
    if errors and not any(isinstance(error, aiodaft.ActorDied) for error in errors):
        return f"{type(errors[0]).__name__} at {len(errors)} of {len(ends)} ranks"
    if errors:
        return f"{ends[0]} of 3 succeed"
    return "right" if all(end == right for end in ends) else f"wrong numbers: {ends[0]}"


async def outcomes() -> list[tuple[str, str, str]]:
    """The outcome of each failure with gloo, and with members of a group."""
    async with aiodaft.Runtime(preload=["torch"]) as rt:
        gloo = await asyncio.gather(*(by_gloo(rt, method, count) for _, method, count, _, _ in FAILURES))
        members = await asyncio.gather(*(by_members(rt, method, count) for _, method, _, count, _ in FAILURES))
    return [
        (name, outcome(theirs, right), outcome(ours, right))
        for (name, *_, right), theirs, ours in zip(FAILURES, gloo, members, strict=True)
    ]


def table(rows: list[tuple[str, object, object]]) -> str:
    return "\n".join(f"{name:36}  {left!s:36}  {right}" for name, left, right in rows)


if __name__ == "__main__":
    print(table([("", "torch.distributed, gloo", "aiodaft"), *aiodaft.run(outcomes())]))
