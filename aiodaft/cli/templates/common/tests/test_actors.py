"""`daft` is a runtime without processes, `daft_cluster` one with processes; both come with aiodaft."""

from __future__ import annotations

import aiodaft
import pytest
from aiodaft.testing import Faults

from actors import Reader, Totals


async def test_words_are_counted(daft: aiodaft.Runtime) -> None:
    reader = await daft.spawn(Reader)
    assert await reader.count("The cat and the dog.") == {"the": 2, "cat": 1, "and": 1, "dog": 1}


async def test_counts_go_from_actor_to_actor(daft: aiodaft.Runtime) -> None:
    reader, totals = await daft.spawn(Reader), await daft.spawn(Totals)
    # `count` returns a ref; `add` gets its value from the reader.
    assert await totals.add(reader.count("a b")) == 2
    assert await totals.add(reader.count("b c")) == 3
    assert await totals.most_common(1) == [("b", 2)]


async def test_a_reader_that_dies_is_restarted(daft_cluster: aiodaft.Runtime, daft_faults: Faults) -> None:
    reader = await daft_cluster.on(restart=aiodaft.Restart(follow=True)).spawn(Reader)
    await daft_faults.kill(reader)
    assert await reader.count("again") == {"again": 1}


async def test_an_actor_that_dies_fails_its_calls(daft: aiodaft.Runtime, daft_faults: Faults) -> None:
    totals = await daft.spawn(Totals)
    await daft_faults.kill(totals)
    with pytest.raises(aiodaft.ActorDied):
        await totals.most_common(1)
