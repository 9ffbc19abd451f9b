"""How a connection between two processes of one host moves from its socket to rings in shared memory. Pure.

    process with the smaller id                 process with the larger id

                          <---  RING_WANTED                      only if this one wants rings
    makes rings           --->  RING_OFFERED + 3 descriptors     maps them
    reads, writes rings   <---  RING_USED + 1 descriptor         writes its ring from here on
                          --->  RING_USED + 1 descriptor         reads its ring from here on
    or drops them         <---  RING_REFUSED                     has no descriptors or memory

Only one side makes offers, so two offers never cross.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from .messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED


class Step(Enum):
    """What a RING message asks for."""

    NOTHING = "there are rings already"
    OFFER = "make rings and offer them"
    TAKE = "map the rings, and write to them or refuse them"
    MOVE = "read and write the rings that were offered"
    READ = "read the rings"
    DROP = "drop the rings that were offered"


# By stage, whether this process has the smaller id, and whether it writes to rings already.
_STEPS: Final = {
    (RING_WANTED, True, False): Step.OFFER,
    (RING_WANTED, True, True): Step.NOTHING,
    (RING_OFFERED, False, False): Step.TAKE,
    (RING_USED, True, False): Step.MOVE,
    (RING_USED, False, True): Step.READ,
    (RING_REFUSED, True, False): Step.DROP,
}


def next_step(stage: int, *, first: bool, writes: bool) -> Step | None:
    """What a RING message asks for; None if it breaks the protocol."""
    return _STEPS.get((stage, first, writes))
