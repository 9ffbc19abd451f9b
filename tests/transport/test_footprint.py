"""The memory of a transfer: the payload on each side, and nothing that grows."""

from __future__ import annotations

import pytest
from far_end import FarEnd, numbers_in, open_far_end
from leaks import forget_peak, status_bytes
from transports import TRANSPORTS

pytestmark = pytest.mark.parametrize("name", TRANSPORTS)

MIB = 1 << 20
# Beyond the payload, or beyond the earlier size.
ROOM = 64 * MIB
soak = pytest.mark.soak


async def moved(far: FarEnd, nbytes: int) -> None:
    """One value from there to here, looked at, and dropped by both."""
    view = await far.fetch(await far.ask("fill", "value", nbytes))
    assert numbers_in(view) == list(range(nbytes // MIB))
    assert sum(view[8::4096]) == nbytes >> 12
    del view
    await far.ask("release", "value")


def both(far: FarEnd, field: str = "VmRSS") -> list[int]:
    return [status_bytes(field), status_bytes(field, far.pid)]


@pytest.mark.parametrize("nbytes", [128 * MIB, pytest.param(1 << 30, marks=soak)])
async def test_a_transfer_takes_the_payload_on_each_side_and_little_more(name: str, nbytes: int) -> None:
    async with open_far_end(name) as far:
        await moved(far, MIB)
        await far.settle()
        for pid in ("self", far.pid):
            forget_peak(pid)
        before = both(far)
        await moved(far, nbytes)
        for peak, earlier in zip(both(far, "VmHWM"), before, strict=True):
            # That much it takes at least: else this looks at the wrong thing.
            assert nbytes - MIB <= peak - earlier <= nbytes + ROOM


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=[soak, pytest.mark.timeout(120)])])
async def test_many_transfers_do_not_grow_the_memory(name: str, count: int) -> None:
    async with open_far_end(name) as far:
        for _ in range(3):
            await moved(far, 8 * MIB)
        await far.settle()
        before = both(far)
        for _ in range(count):
            await moved(far, 8 * MIB)
        for now, earlier in zip(both(far), before, strict=True):
            assert now - earlier < ROOM
