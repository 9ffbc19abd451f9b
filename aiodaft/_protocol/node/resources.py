"""The resources of a node and their holders: counted, never overcommitted. Pure."""

# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from aiodaft._protocol.numbers import is_number
from aiodaft.exceptions import InsufficientResources


class Gpu(NamedTuple):
    """A GPU of the machine.

    Attributes:
        device: The name of its device file, the same for all processes of the machine that see it.
        uuid: Its name in CUDA, such as "GPU-6f2c..."; "" if the driver has not told it.
    """

    device: str
    uuid: str = ""


def gpu_names(machine: Sequence[Gpu], allowed: str | None, declared: object = None) -> list[str]:
    """The names that CUDA has for the GPUs of this process: numbers of the machine, or ids if it may use only some.

    A GPU that is `declared` and not there has a number that no GPU has.
    """
    visible = _visible(allowed or "", machine)
    if declared is None:
        return [str(gpu) for gpu in range(len(machine))] if allowed is None else visible
    # `Resources` refuses anything but a number that is not negative.
    count = max(0, declared) if isinstance(declared, int) else 0
    others = map(str, itertools.count(len(machine) if visible else 0))
    return list(itertools.islice(itertools.chain(visible, (name for name in others if name not in visible)), count))


def device_named(name: str, machine: Sequence[Gpu]) -> str:
    """Empty if the machine does not have the GPU with this name in CUDA."""
    if name.isdecimal():
        return machine[int(name)].device if int(name) < len(machine) else ""
    # CUDA also takes the beginning of an id.
    found = next((gpu.device for gpu in machine if gpu.uuid.startswith(name)), "")
    # A part of a GPU, or an id that is not known here, stands for itself.
    is_unknown = name.startswith("MIG-") or any(not gpu.uuid for gpu in machine)
    return found or (name if machine and is_unknown else "")


def _visible(allowed: str, machine: Sequence[Gpu]) -> list[str]:
    """The entries that count: those before the first one that names no GPU, as CUDA has it."""
    entries = [entry.strip() for entry in allowed.split(",")]
    visible = list(itertools.takewhile(lambda entry: _names_gpu(entry, machine), entries))
    # With one entry twice, CUDA finds none.
    return visible if len(set(visible)) == len(visible) else []


def _names_gpu(entry: str, machine: Sequence[Gpu]) -> bool:
    if entry.isdecimal():
        return not machine or int(entry) < len(machine)
    return entry.startswith("MIG-") or (
        entry.startswith("GPU-") and (not machine or any(not gpu.uuid or gpu.uuid.startswith(entry) for gpu in machine))
    )


HolderT = TypeVar("HolderT", bound=Hashable)

# Sums of fractions such as three times a third of a GPU are compared with this slack.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """Fractions below one share one GPU; whole GPUs are exclusive."""

    cpus: float = 0.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        _check_amounts(self.cpus, self.gpus, self.custom)
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus={self.gpus}: take whole GPUs, or a fraction of one")


class Claims(Protocol):
    """Claims that keep several runtimes from using the same GPU of a machine."""

    def take(self, gpu: int) -> str | None:
        """Returns the holder if another runtime has the GPU. Idempotent."""
        ...

    def give_back(self, gpu: int) -> None: ...


class Stock(NamedTuple):
    """The resources of a node or a slice, at one moment; `totals` count those in use, too."""

    totals: Mapping[str, float]
    free: Mapping[str, float]
    gpus: tuple[float, ...]

    def room_for(self, demand: Demand, most: int) -> int:
        needs = {"cpus": demand.cpus, **demand.custom}
        rooms = [(self.free.get(name, 0.0) + _EPSILON) // amount for name, amount in needs.items() if amount]
        if demand.gpus >= 1:
            rooms.append(self.whole_gpus // int(demand.gpus))
        elif demand.gpus:
            rooms.append(sum((free + _EPSILON) // demand.gpus for free in self.gpus))
        return max(0, int(min([most, *rooms])))

    @property
    def whole_gpus(self) -> int:
        return sum(free > 1 - _EPSILON for free in self.gpus)

    def less(self, demand: Demand, count: int) -> Stock:
        """Shares are taken as the node assigns them."""
        needs = {"cpus": demand.cpus, **demand.custom}
        free = {name: amount - count * needs.get(name, 0.0) for name, amount in self.free.items()}
        gpus = list(self.gpus)
        if demand.gpus >= 1:
            whole = [number for number, share in enumerate(gpus) if share > 1 - _EPSILON]
            for number in whole[: count * int(demand.gpus)]:
                gpus[number] = 0.0
        elif demand.gpus:
            for _ in range(count):
                fitting = [number for number, share in enumerate(gpus) if demand.gpus <= share + _EPSILON]
                if fitting:
                    gpus[min(fitting, key=gpus.__getitem__)] -= demand.gpus
        return Stock(self.totals, free, tuple(gpus))

    def all_free(self) -> Stock:
        return Stock(self.totals, self.totals, (1.0,) * len(self.gpus))


class Wish(NamedTuple, Generic[HolderT]):
    holder: HolderT
    label: str
    demand: Demand


class _Shortage(NamedTuple):
    name: str
    amount: float
    others: tuple[str, ...] = ()


class Resources(Generic[HolderT]):
    """Resources of one node, or of one slice of it. A GPU is claimed while an actor has a part of it.

    A slice is a holder from whose share other holders take. They take a resource that the slice lacks from the node.
    """

    def __init__(
        self, *, cpus: float, gpus: int, custom: Mapping[str, float] | None = None, claims: Claims | None = None
    ) -> None:
        _check_amounts(cpus, gpus, custom or {})
        if not isinstance(gpus, int):
            raise ValueError(f"gpus={gpus!r}: a node has a whole number of GPUs")
        self.totals: dict[str, float] = {"cpus": float(cpus), **(custom or {})}
        self._what = "this node"
        self._used: dict[str, float] = dict.fromkeys(self.totals, 0.0)
        self._gpus: dict[int, float] = dict.fromkeys(range(gpus), 0.0)
        self._claims = claims
        self._holders: dict[HolderT, tuple[str, Demand, tuple[int, ...]]] = {}
        self._slices: dict[HolderT, Resources[HolderT]] = {}
        # The slice that a holder has its share of, and the slices that end with their last holder.
        self._inside: dict[HolderT, HolderT] = {}
        self._released: set[HolderT] = set()
        # Grows whenever something was given back.
        self.revision = 0
        self.refusal = ""

    @property
    def gpus(self) -> int:
        return len(self._gpus)

    def __len__(self) -> int:
        return len(self._holders)

    def take(self, holder: HolderT, label: str, demand: Demand, within: HolderT | None = None) -> tuple[int, ...]:
        """Reserve the resources of an actor, until `give_back`; returns the numbers of its GPUs.

        Raises:
            InsufficientResources: The node does not have it, or others hold it; nothing was reserved.
        """
        return self.take_all([Wish(holder, label, demand)], within)[0]

    def check_open(self, label: str) -> None:
        if self.refusal:
            raise InsufficientResources(f"{label} cannot be placed: {self.refusal}")

    def take_all(self, wishes: Sequence[Wish[HolderT]], within: HolderT | None = None) -> list[tuple[int, ...]]:
        """Reserve the resources of several actors, or none; see `take`."""
        for wish in wishes:
            self.check_open(wish.label)
        taken: list[tuple[int, ...]] = []
        revision = self.revision
        for holder, label, demand in wishes:
            if holder in self._holders or holder in self._inside:
                raise ValueError(f"{label} has its resources already")
            source, found = self._take_within(holder, label, demand, within)
            if isinstance(found, _Shortage):
                for wish in wishes[: len(taken)]:
                    self._return(wish.holder, keep_gpus=False)
                self.revision = revision
                most = f"{len(taken)} of {len(wishes)} such actors fit: " if taken else ""
                raise InsufficientResources(most + source._refusal(label, found))
            taken.append(found)
        return taken

    def _take_within(
        self, holder: HolderT, label: str, demand: Demand, within: HolderT | None
    ) -> tuple[Resources[HolderT], tuple[int, ...] | _Shortage]:
        """Returns also the node or slice in which the resources were found or missed."""
        if within is None:
            return self, self._take(holder, label, demand)
        part = self._slice(within, label)
        inner, outer = part._split(demand)
        found = part._take(holder, label, inner)
        if isinstance(found, _Shortage):
            return part, found
        more = self._take(holder, label, outer)
        if isinstance(more, _Shortage):
            part._return(holder, keep_gpus=False)
            return self, more
        self._inside[holder] = within
        return part, found + more

    def _take(self, holder: HolderT, label: str, demand: Demand) -> tuple[int, ...] | _Shortage:
        needs = {"cpus": demand.cpus, **demand.custom}
        for name, amount in needs.items():
            if amount > self.totals.get(name, 0.0) - self._used.get(name, 0.0) + _EPSILON:
                return _Shortage(name, amount)
        chosen = self._choose_gpus(demand.gpus)
        if isinstance(chosen, _Shortage):
            return chosen
        for name, amount in needs.items():
            if amount:
                self._used[name] += amount
        for number in chosen:
            self._gpus[number] += min(1.0, demand.gpus)
        self._holders[holder] = (label, demand, chosen)
        return chosen

    def _choose_gpus(self, amount: float) -> tuple[int, ...] | _Shortage:
        if not amount:
            return ()
        if amount < 1:
            # The fullest GPU that still has room, so that whole ones stay whole.
            fitting = [number for number, used in self._gpus.items() if used + amount <= 1 + _EPSILON]
            fitting.sort(key=lambda number: -self._gpus[number])
        else:
            fitting = [number for number, used in self._gpus.items() if used < _EPSILON]
        chosen, others = self._claim(fitting, max(1, int(amount)))
        if len(chosen) < max(1, int(amount)):
            self._unclaim(chosen)
            return _Shortage("gpus", amount, tuple(others))
        return tuple(chosen)

    def carve(self, holder: HolderT, label: str, demand: Demand) -> tuple[int, ...]:
        """Reserve a slice, of whole GPUs; `give_back` releases it. See `take`."""
        if demand.gpus != int(demand.gpus):
            raise ValueError(f"gpus={demand.gpus}: a slice has whole GPUs")
        gpus = self.take(holder, label, demand)
        part: Resources[HolderT] = Resources(cpus=demand.cpus, gpus=0, custom=demand.custom)
        part._what = f"this slice of {label}"
        part._gpus = dict.fromkeys(gpus, 0.0)
        self._slices[holder] = part
        return gpus

    def _slice(self, holder: HolderT, label: str) -> Resources[HolderT]:
        part = self._slices.get(holder)
        if part is None or holder in self._released:
            raise InsufficientResources(f"{label} was to take from a slice of a mesh that is released")
        return part

    def _split(self, demand: Demand) -> tuple[Demand, Demand]:
        has = {name for name, total in self.totals.items() if total}
        inner = {name: amount for name, amount in demand.custom.items() if name in has}
        outer = {name: amount for name, amount in demand.custom.items() if name not in has}
        cpus, gpus = demand.cpus if "cpus" in has else 0.0, demand.gpus if self._gpus else 0.0
        return Demand(cpus, gpus, inner), Demand(demand.cpus - cpus, demand.gpus - gpus, outer)

    def give_back(self, holder: HolderT, *, keep_gpus: bool = False) -> None:
        """Return the resources of a holder, or all but its GPUs; nothing if it had none.

        A slice whose actors still have their shares is returned with the last of these.
        """
        if holder in self._slices:
            if len(self._slices[holder]):
                self._released.add(holder)
                return
            del self._slices[holder]
        self._return(holder, keep_gpus=keep_gpus)

    def _return(self, holder: HolderT, *, keep_gpus: bool) -> None:
        within = self._inside.get(holder)
        if within is not None:
            part = self._slices[within]
            part._return(holder, keep_gpus=keep_gpus)
            if holder not in part._holders:
                del self._inside[holder]
        if holder in self._holders or within is not None:
            self.revision += 1
        label, demand, chosen = self._holders.pop(holder, ("", Demand(), ()))
        if keep_gpus and chosen:
            self._holders[holder] = (label, Demand(gpus=demand.gpus), chosen)
            chosen = ()
        for name, amount in {"cpus": demand.cpus, **demand.custom}.items():
            if amount:
                self._used[name] -= amount
        for number in chosen:
            self._gpus[number] -= min(1.0, demand.gpus)
        self._unclaim(chosen)
        if within in self._released and not len(self._slices[within]):
            self._released.remove(within)
            self.give_back(within)

    def share_of(self, holder: HolderT) -> tuple[float, tuple[int, ...]]:
        _, demand, chosen = self._holders.get(holder, ("", Demand(), ()))
        within = self._inside.get(holder)
        cpus, gpus = (0.0, ()) if within is None else self._slices[within].share_of(holder)
        return demand.cpus + cpus, chosen + gpus

    def free(self) -> dict[str, float]:
        left = {name: total - self._used[name] for name, total in self.totals.items()}
        return {**left, "gpus": sum(1.0 - used for used in self._gpus.values())}

    def stock(self, within: HolderT | None = None) -> Stock:
        totals, free = {**self.totals, "gpus": float(self.gpus)}, self.free()
        gpus = tuple(1.0 - used for used in self._gpus.values())
        if within is None:
            return Stock(totals, free, gpus)
        inner = self._slice(within, "an actor").stock()
        has = {name for name, total in inner.totals.items() if total}
        return Stock(
            {**totals, **{name: inner.totals[name] for name in has}},
            {**free, **{name: inner.free[name] for name in has}},
            inner.gpus or gpus,
        )

    def _claim(self, gpus: list[int], count: int) -> tuple[list[int], list[str]]:
        """The first `count` that can be claimed, and an explanation for each GPU that another runtime has."""
        chosen: list[int] = []
        others: list[str] = []
        for gpu in gpus:
            if len(chosen) == count:
                break
            holder = None if self._claims is None else self._claims.take(gpu)
            if holder is None:
                chosen.append(gpu)
            else:
                others.append(f"GPU {gpu} is in use by {holder}, unless Runtime(share_gpus=True) is to share it")
        return chosen, others

    def _unclaim(self, gpus: Iterable[int]) -> None:
        if self._claims is not None:
            for gpu in gpus:
                if self._gpus[gpu] < _EPSILON:
                    self._claims.give_back(gpu)

    def _refusal(self, label: str, shortage: _Shortage) -> str:
        name, amount, others = shortage
        total = float(self.gpus) if name == "gpus" else self.totals.get(name, 0.0)
        users = [
            f"{who} has {n:g}" for who, n in ((h, self._amount(d, name)) for h, d, _ in self._holders.values()) if n
        ]
        in_use = f": {', '.join(users)}" if users else ""
        left = self.free().get(name, 0.0)
        declared = f"{name}=..." if name in {"cpus", "gpus"} else f"resources={{{name!r}: ...}}"
        hint = "" if total else f"; declare them by hand with Runtime({declared}) if you know better"
        reason = (
            f"{label} needs {name}={amount:g}, but {self._what} has {total:g}, of which {left:g} free{in_use}{hint}"
        )
        return "; ".join([reason, *others])

    @staticmethod
    def _amount(demand: Demand, name: str) -> float:
        return {"cpus": demand.cpus, "gpus": demand.gpus}.get(name, demand.custom.get(name, 0.0))


def _check_amounts(cpus: float, gpus: float, custom: Mapping[str, float]) -> None:
    if builtin := {"cpus", "gpus"} & custom.keys():
        raise ValueError(f"ask for {' and '.join(sorted(builtin))} by that argument, not among other resources")
    for name, amount in {"cpus": cpus, "gpus": gpus, **custom}.items():
        if not is_number(amount):
            raise ValueError(f"{name}={amount!r}: resources are numbers that are not negative")
