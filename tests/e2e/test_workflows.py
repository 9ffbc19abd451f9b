"""Workflows that actors hand on to each other, with the controller idle (row MP4)."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain

from workflows import Stage

import aiodaft

WORKFLOWS = 2_000
HOPS = 5


async def test_two_thousand_workflows_run_once_each_while_the_controller_is_idle() -> None:
    async with aiodaft.Runtime(gpus=0) as rt:
        stages = [await rt.spawn(Stage) for _ in range(4)]
        await asyncio.gather(*(stage.meet(stages) for stage in stages))
        before = rt.traffic()
        shares = [range(place, WORKFLOWS, 4) for place in range(4)]
        done = await asyncio.gather(
            *(stage.run(list(share), HOPS) for stage, share in zip(stages, shares, strict=True))
        )
        after = rt.traffic()
        # Every workflow ended once, where it began, after five hops over all stages.
        assert [sorted(names) for names in done] == [list(share) for share in shares]
        hops = await asyncio.gather(*(stage.hops() for stage in stages))
        assert Counter(chain(*hops)) == dict.fromkeys(range(WORKFLOWS), HOPS)
        # Four calls and their answers, and the runtime's own messages: not one message per hop, or per workflow.
        assert after.messages_sent - before.messages_sent < 50
        assert after.messages_received - before.messages_received < 50


async def test_what_a_method_returns_to_a_tell_is_dropped() -> None:
    async with aiodaft.Runtime(gpus=0) as rt:
        stage = await rt.spawn(Stage)
        for size in (1 << 10, 1 << 20):
            stage.large.tell(size)
            async with aiodaft.deadline(60):
                stage.large.tell(size)
        while (info := await rt.info(stage)).done < 4:
            await asyncio.sleep(0)
        assert info.stored_bytes == 0
