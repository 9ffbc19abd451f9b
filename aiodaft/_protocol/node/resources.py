"""The resources of a node and their holders: counted, never overcommitted. Pure."""

# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from aiodaft.exceptions import InsufficientResources

HolderT = TypeVar("HolderT", bound=Hashable)

# Sums of fractions such as three times a third of a GPU are compared with this slack.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """What an actor needs. Fractions below one share one GPU; whole GPUs are exclusive."""

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
        """Claim a GPU by its number in the node; returns the holder if another runtime has it. Idempotent."""
        ...

    def give_back(self, gpu: int) -> None:
        """End the claim. Idempotent."""
        ...


class Resources(Generic[HolderT]):
    """Resources of one node. A GPU is claimed while an actor has at least a part of it."""

    def __init__(
        self, *, cpus: float, gpus: int, custom: Mapping[str, float] | None = None, claims: Claims | None = None
    ) -> None:
        _check_amounts(cpus, gpus, custom or {})
        if not isinstance(gpus, int):
            raise ValueError(f"gpus={gpus!r}: a node has a whole number of GPUs")
        self.totals: dict[str, float] = {"cpus": float(cpus), **(custom or {})}
        self.gpus = gpus
        self._used: dict[str, float] = dict.fromkeys(self.totals, 0.0)
        self._gpus: list[float] = [0.0] * gpus
        self._claims = claims
        self._holders: dict[HolderT, tuple[str, Demand, tuple[int, ...]]] = {}

    def take(self, holder: HolderT, label: str, demand: Demand) -> tuple[int, ...]:
        """Reserve what an actor needs, until `give_back`; returns the numbers of its GPUs.

        Raises:
            InsufficientResources: The node does not have it, or others hold it; nothing was reserved.
        """
        if holder in self._holders:
            raise ValueError(f"{label} has its resources already")
        needs = {"cpus": demand.cpus, **demand.custom}
        for name, amount in needs.items():
            if amount > self.totals.get(name, 0.0) - self._used.get(name, 0.0) + _EPSILON:
                raise InsufficientResources(self._refusal(label, name, amount))
        chosen = self._choose_gpus(label, demand.gpus)
        for name, amount in needs.items():
            if amount:
                self._used[name] += amount
        for index in chosen:
            self._gpus[index] += min(1.0, demand.gpus)
        self._holders[holder] = (label, demand, chosen)
        return chosen

    def share_of(self, holder: HolderT) -> tuple[float, tuple[int, ...]]:
        """How many CPUs a holder has, and the numbers of its GPUs."""
        _, demand, chosen = self._holders.get(holder, ("", Demand(), ()))
        return demand.cpus, chosen

    def give_back(self, holder: HolderT, *, keep_gpus: bool = False) -> None:
        """Return what a holder had, or all but its GPUs; nothing if it had nothing."""
        label, demand, chosen = self._holders.pop(holder, ("", Demand(), ()))
        if keep_gpus and chosen:
            self._holders[holder] = (label, Demand(gpus=demand.gpus), chosen)
            chosen = ()
        for name, amount in {"cpus": demand.cpus, **demand.custom}.items():
            if amount:
                self._used[name] -= amount
        for index in chosen:
            self._gpus[index] -= min(1.0, demand.gpus)
        self._unclaim(chosen)

    def free(self) -> dict[str, float]:
        """What is left of each resource."""
        left = {name: total - self._used[name] for name, total in self.totals.items()}
        return {**left, "gpus": sum(1.0 - used for used in self._gpus)}

    def _choose_gpus(self, label: str, amount: float) -> tuple[int, ...]:
        if not amount:
            return ()
        if amount < 1:
            # The fullest GPU that still has room, so that whole ones stay whole.
            fitting = [i for i, used in enumerate(self._gpus) if used + amount <= 1 + _EPSILON]
            fitting.sort(key=lambda i: -self._gpus[i])
        else:
            fitting = [i for i, used in enumerate(self._gpus) if used < _EPSILON]
        chosen, others = self._claim(fitting, max(1, int(amount)))
        if len(chosen) < max(1, int(amount)):
            self._unclaim(chosen)
            raise InsufficientResources("; ".join([self._refusal(label, "gpus", amount), *others]))
        return tuple(chosen)

    def _claim(self, gpus: list[int], count: int) -> tuple[list[int], list[str]]:
        """The first `count` GPUs that can be claimed, and an explanation for each GPU that another runtime has."""
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
        """Give back the claims of GPUs without holders."""
        if self._claims is not None:
            for gpu in gpus:
                if self._gpus[gpu] < _EPSILON:
                    self._claims.give_back(gpu)

    def _refusal(self, label: str, name: str, amount: float) -> str:
        total = float(len(self._gpus)) if name == "gpus" else self.totals.get(name, 0.0)
        users = [
            f"{who} has {n:g}" for who, n in ((h, self._amount(d, name)) for h, d, _ in self._holders.values()) if n
        ]
        in_use = f": {', '.join(users)}" if users else ""
        left = self.free().get(name, 0.0)
        declared = f"{name}=..." if name in {"cpus", "gpus"} else f"resources={{{name!r}: ...}}"
        hint = "" if total else f"; declare them by hand with Runtime({declared}) if you know better"
        return f"{label} needs {name}={amount:g}, but this node has {total:g}, of which {left:g} free{in_use}{hint}"

    @staticmethod
    def _amount(demand: Demand, name: str) -> float:
        return {"cpus": demand.cpus, "gpus": demand.gpus}.get(name, demand.custom.get(name, 0.0))


def gpu_names(machine: Sequence[str], allowed: str | None, declared: object = None) -> list[str]:
    """The names that CUDA has for the GPUs of this process: numbers of the machine, or ids if it may use only some.

    `machine` are the ids of all GPUs, `allowed` is CUDA_VISIBLE_DEVICES, `declared` their number if the user gives it.
    """
    visible = [name for entry in (allowed or "").split(",") if (name := entry.strip()) not in ("", "-1")]
    if declared is None:
        return [str(gpu) for gpu in range(len(machine))] if allowed is None else visible
    # `Resources` refuses anything but a number.
    count = declared if isinstance(declared, int) else 0
    return [visible[gpu] if gpu < len(visible) else str(gpu) for gpu in range(count)]


def id_named(name: str, machine: Sequence[str]) -> str:
    """The id of the GPU with this name in CUDA; "" if the machine does not have it."""
    if name.isdigit():
        return machine[int(name)] if int(name) < len(machine) else ""
    if name.startswith("MIG-"):
        return name if machine else ""
    # CUDA also takes the beginning of an id.
    return next((found for found in machine if found.startswith(name)), "")


def _check_amounts(cpus: float, gpus: float, custom: Mapping[str, float]) -> None:
    if builtin := {"cpus", "gpus"} & custom.keys():
        raise ValueError(f"ask for {' and '.join(sorted(builtin))} by that argument, not among other resources")
    for name, amount in {"cpus": cpus, "gpus": gpus, **custom}.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ValueError(f"{name}={amount!r}: resources are numbers that are not negative")
