"""Collectives as dataflows: for each member, the values that it makes and those that it needs.

A plan names no moment and no message: a step runs when its inputs exist, at any member. So no two collectives wait for
each other, in any order of issue and with any shared members.

Algorithms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

# Bytes of a value up to which the number of messages counts, and members up to which each may read all values.
SMALL: Final = 1 << 16
FEW: Final = 4
# Bytes of a value up to which one member reduces all, on several machines.
MEDIUM: Final = 1 << 20
# Bytes of all values together from which on each member reduces a part, also on one machine.
LARGE: Final = 1 << 28
# Bytes of all values together up to which a member reduces them on its loop: that takes less than a millisecond.
QUICK: Final = 4 << 20


Parts: TypeAlias = int | tuple[int, ...]


class Work(enum.IntEnum):
    TAKE = 0  # gives its only input
    REDUCE = 1  # combines them, from the left
    LIST = 2  # makes a list of them
    JOIN = 3  # puts the parts after the first input together to a value of its shape
    CUT = 4  # gives a copy of a part of its only input, which the member may write to afterwards
    TOTAL = 5  # as REDUCE, for a result that others take while the member may write to its own


class Cut(enum.IntEnum):
    WHOLE = 0
    ELEMENTS = 1  # an equal part of the elements, in the order of rows
    ROWS = 2  # an equal part along the first dimension
    ITEM = 3  # one item of a list


@dataclass(frozen=True, slots=True)
class Step:
    rank: int
    work: Work
    inputs: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    part: int = 0


def runs_on_loop(work: Work, nbytes: int, *, by_function: bool) -> bool:
    """Whether a step is quick enough for the member's loop; a thread costs two wake-ups.

    Args:
        nbytes: The bytes of all inputs together.
        by_function: Whether code of the user reduces, which may take any time.
    """
    match work:
        case Work.REDUCE | Work.TOTAL:
            return nbytes <= QUICK and not by_function
        case Work.LIST:
            return True
        case _:
            return nbytes <= SMALL


def meets_with_values(operation: str, members: int, nbytes: int) -> bool:
    """The values of members that meet go to one of them, which reduces all: one round trip."""
    return operation in {"all_reduce", "reduce"} and members * nbytes <= QUICK


class Plan:
    """The steps of a collective, in an order in which each comes after its inputs.

    The values 0 to n - 1 are those of the first n members; each step makes the next value. Values are cut into `parts`,
    by default one for each member.
    """

    def __init__(self, members: int, parts: int | None = None) -> None:
        self.members = members
        self.parts = members if parts is None else parts
        self.lengths: tuple[int, ...] | None = None
        self.steps: list[Step] = []
        self.results: list[int] = []

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(range(self.members))

    def rank_of(self, value: int) -> int:
        return value if value < self.members else self.steps[value - self.members].rank

    def add(self, rank: int, work: Work, *inputs: int, cut: Cut = Cut.WHOLE, part: int = 0) -> int:
        self.steps.append(Step(rank, work, inputs, cut, part))
        return self.members + len(self.steps) - 1

    def join(self, rank: int, parts: list[int]) -> int:
        return self.add(rank, Work.JOIN, rank, *parts)

    def beside(self, rank: int, result: int | None) -> list[int]:
        """The values that a member makes of its own one, and that its result is not made of."""
        needed: set[int] = set()
        ahead = [] if result is None else [result]
        while ahead:
            number = ahead.pop()
            if number >= self.members and number not in needed:
                needed.add(number)
                ahead += self.steps[number - self.members].inputs
        made = enumerate(self.steps, self.members)
        return [number for number, step in made if step.rank == rank in step.inputs and number not in needed]


def exchange(members: int) -> Plan:
    """One step for each member."""
    plan = Plan(members)
    plan.results = [plan.add(rank, Work.REDUCE, *plan.inputs) for rank in plan.inputs]
    return plan


def star(members: int) -> Plan:
    """Member 0 reduces all values in the order of ranks; the others take the result."""
    plan = Plan(members)
    total = plan.add(0, Work.TOTAL, *plan.inputs)
    plan.results = [total, *(plan.add(rank, Work.TAKE, total) for rank in plan.inputs[1:])]
    return plan


def shared(members: int) -> Plan:
    """Each member reduces its part of all values, in the order of ranks, and joins the parts of all members.

    It reads the values where they lie: for members that share memory.
    """
    plan = Plan(members)
    parts = [plan.add(rank, Work.REDUCE, *plan.inputs, cut=Cut.ELEMENTS, part=rank) for rank in plan.inputs]
    plan.results = [plan.join(rank, parts) for rank in plan.inputs]
    return plan


def direct(members: int) -> Plan:
    """Each member sends to each other one only the part that this one reduces."""
    plan = Plan(members)
    parts = [_reduce_cut(plan, Cut.ELEMENTS, rank) for rank in plan.inputs]
    plan.results = [plan.join(rank, parts) for rank in plan.inputs]
    return plan


def ring(members: int) -> Plan:
    """Parts travel round the ring of members, first to be reduced, then to be known to all.

    Part k is reduced in the order k + 1, k + 2, ..., k of ranks: only for reducers whose result does not depend on the
    order.
    """
    plan = Plan(members)
    known: list[list[int]] = [[] for _ in plan.inputs]
    for part in plan.inputs:
        round_trip = [(part + hop) % members for hop in range(1, members + 1)]
        value = _cut(plan, round_trip[0], Cut.ELEMENTS, part)
        for rank in round_trip[1:]:
            value = plan.add(rank, Work.REDUCE, value, rank, cut=Cut.ELEMENTS, part=part)
        known[part].append(value)
        for rank in round_trip[:-1]:
            value = plan.add(rank, Work.TAKE, value)
            known[rank].append(value)
    plan.results = [plan.join(rank, known[rank]) for rank in plan.inputs]
    return plan


def tree(members: int) -> Plan:
    """Neighbours reduce in pairs, then pairs of pairs, in the order of ranks; the result goes back the same way."""
    plan = Plan(members)
    held = list(plan.inputs)
    distances = [1 << level for level in range((members - 1).bit_length())]
    for distance in distances:
        work = Work.TOTAL if distance == distances[-1] else Work.REDUCE
        for rank in range(0, members - distance, 2 * distance):
            held[rank] = plan.add(rank, work, held[rank], held[rank + distance])
    for distance in reversed(distances):
        for rank in range(0, members - distance, 2 * distance):
            held[rank + distance] = plan.add(rank + distance, Work.TAKE, held[rank])
    if members == 1:
        held = [plan.add(0, Work.REDUCE, 0)]
    plan.results = held
    return plan


def doubling(members: int) -> Plan:
    """Recursive doubling: all members exchange at distances 1, 2, 4, ...; those over a power of two join in before.

    Only for reducers whose result does not depend on the order.
    """
    plan = Plan(members)
    core = 1 << (members.bit_length() - 1)
    held = list(plan.inputs)
    for rank in range(core, members):
        held[rank - core] = plan.add(rank - core, Work.REDUCE, held[rank - core], held[rank])
    distance = 1
    while distance < core:
        # The lower rank comes first at both members: so they have the same bits.
        pairs = [(held[rank & ~distance], held[rank | distance]) for rank in range(core)]
        distance *= 2
        taken = members - core if distance == core else 0
        held[:core] = [
            plan.add(rank, Work.TOTAL if rank < taken else Work.REDUCE, *pair) for rank, pair in enumerate(pairs)
        ]
    if members == 1:
        held = [plan.add(0, Work.REDUCE, 0)]
    held[core:] = [plan.add(rank, Work.TAKE, held[rank - core]) for rank in range(core, members)]
    plan.results = held
    return plan


ALL_REDUCE: Final[Mapping[str, Callable[[int], Plan]]] = {
    algorithm.__name__: algorithm for algorithm in (exchange, star, shared, direct, ring, tree, doubling)
}


def choose(members: int, nbytes: int | None, *, one_memory: bool, elementwise: bool) -> str:
    """The algorithm of an all-reduce.

    Args:
        nbytes: The size of the largest value; None if one does not exist yet.
        elementwise: Whether a part of a value can be reduced without the rest.
    """
    if members == 1 or (members == 2 and elementwise):
        # Two members send no fewer bytes by parts.
        return "exchange"
    if nbytes is not None and nbytes <= SMALL:
        return "exchange" if members <= FEW else "star"
    if not elementwise:
        return "star"
    if one_memory:
        # The threads of one member reduce as fast as the memory is, and a round less is needed.
        return "star" if nbytes is None or members * nbytes <= LARGE else "shared"
    return "star" if nbytes is not None and nbytes <= MEDIUM else "direct"


def reduce(members: int, root: int, *, by_parts: bool) -> Plan:
    """The root reduces all values itself, or each member a part of them."""
    plan = Plan(members)
    if by_parts:
        parts = [plan.add(rank, Work.REDUCE, *plan.inputs, cut=Cut.ELEMENTS, part=rank) for rank in plan.inputs]
        plan.results = [plan.join(root, parts)]
    else:
        plan.results = [plan.add(root, Work.REDUCE, *plan.inputs)]
    return plan


def reduce_scatter(members: int, lengths: tuple[int, ...] | None = None, *, one_memory: bool) -> Plan:
    plan = Plan(members)
    plan.lengths = lengths
    if one_memory:
        plan.results = [plan.add(rank, Work.REDUCE, *plan.inputs, cut=Cut.ROWS, part=rank) for rank in plan.inputs]
    else:
        plan.results = [_reduce_cut(plan, Cut.ROWS, rank) for rank in plan.inputs]
    return plan


def all_gather(members: int) -> Plan:
    plan = Plan(members)
    plan.results = [plan.add(rank, Work.LIST, *plan.inputs) for rank in plan.inputs]
    return plan


def gather(members: int, root: int) -> Plan:
    plan = Plan(members)
    plan.results = [plan.add(root, Work.LIST, *plan.inputs)]
    return plan


def all_to_all(members: int, *, one_memory: bool) -> Plan:
    plan = Plan(members)
    for rank in plan.inputs:
        if one_memory:
            plan.results.append(plan.add(rank, Work.LIST, *plan.inputs, cut=Cut.ITEM, part=rank))
        else:
            items = [_cut(plan, source, Cut.ITEM, rank) for source in plan.inputs]
            plan.results.append(plan.add(rank, Work.LIST, *items))
    return plan


def hand_out(receivers: int, cut: Cut, *, one_memory: bool) -> Plan:
    """Value 0 of member 0, or item k of it, goes to member k + 1, for all receivers."""
    plan = Plan(1, receivers)
    for part in range(receivers):
        if one_memory or cut is Cut.WHOLE:
            plan.results.append(plan.add(part + 1, Work.TAKE, 0, cut=cut, part=part))
        else:
            plan.results.append(plan.add(part + 1, Work.TAKE, _cut(plan, 0, cut, part)))
    return plan


def _cut(plan: Plan, rank: int, cut: Cut, part: int) -> int:
    return plan.add(rank, Work.CUT, rank, cut=cut, part=part)


def _reduce_cut(plan: Plan, cut: Cut, rank: int) -> int:
    """Every other member cuts off the part; this one reads its own value in place."""
    cuts = [source if source == rank else _cut(plan, source, cut, rank) for source in plan.inputs]
    # To cut a part again changes nothing.
    return plan.add(rank, Work.REDUCE, *cuts, cut=cut, part=rank)


def values_of(operation: str, members: int, root: int) -> tuple[int, ...]:
    return (root,) if operation in {"broadcast", "scatter"} else tuple(range(members))


def results_of(operation: str, members: int, root: int) -> tuple[int, ...]:
    return (root,) if operation in {"reduce", "gather"} else tuple(range(members))


def plan_of(
    operation: str,
    members: int,
    root: int,
    nbytes: int | None,
    lengths: tuple[int, ...] | None = None,
    *,
    one_memory: bool,
    elementwise: bool,
) -> Plan:
    """The plan of a collective by its name.

    Args:
        members: Those of the plan of `broadcast` or `scatter` are the root, then all.
        root: The rank that alone has a value or gets a result.
        nbytes, one_memory, elementwise: As for `choose`.
        lengths: Of `reduce_scatter`: the rows of each member. Default: equal parts.
    """
    match operation:
        case "all_reduce":
            return ALL_REDUCE[choose(members, nbytes, one_memory=one_memory, elementwise=elementwise)](members)
        case "reduce":
            by_parts = elementwise and one_memory and (nbytes is None or nbytes > SMALL)
            return reduce(members, root, by_parts=by_parts)
        case "reduce_scatter":
            return reduce_scatter(members, lengths, one_memory=one_memory)
        case "all_gather":
            return all_gather(members)
        case "gather":
            return gather(members, root)
        case "all_to_all":
            return all_to_all(members, one_memory=one_memory)
        case "broadcast":
            return hand_out(members, Cut.WHOLE, one_memory=one_memory)
        case "scatter":
            return hand_out(members, Cut.ITEM, one_memory=one_memory)
        case _:
            raise ValueError(f"there is no collective {operation!r}")
