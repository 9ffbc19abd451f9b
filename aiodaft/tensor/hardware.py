"""The hardware that a plan is simulated on: a few numbers, which are written by hand or measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Final

_FACTORS: Final = frozenset({"compute", "memory", "bandwidth", "links"})


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of each device with its neighbours.

    Attributes:
        devices: The number of neighbours that it joins: ranks 0 to 7 and 8 to 15 of nodes with 8 devices.
        bandwidth: Bytes per second that a device receives, while it sends as many.
        latency: Seconds of a collective of two without bytes.
        message: Seconds of a message without bytes from stage to stage, if it is another number.
    """

    devices: int
    bandwidth: float
    latency: float
    message: float | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices of one kind, and their links. Rank `n` of a plan is on device `n`.

    Attributes:
        compute: Floating-point operations per second of matrix products, by dtype, such as `{"bfloat16": 6e14}`.
        memory: Bytes that a device has.
        bandwidth: Bytes per second that an operation reads and writes.
        rates: Single operations of which it is another number, since they compute more: `{"aten.gelu": 1e10}`; of
            attention and others whose floating-point operations are counted, these per second.
        overhead: Seconds that one operation takes beside its work.
        links: From the nearest neighbours to all devices.
        processors: The processors that all ranks share, and that also copy what the links carry; 0 if each rank has a
            device of its own.
        uneven: What some devices have more or less of, as factors of `compute`, `memory`, `bandwidth` and `links`:
            `{3: {"compute": 0.5}}`.
    """

    compute: Mapping[str, float]
    memory: float
    bandwidth: float
    overhead: float
    links: Sequence[Link]
    rates: Mapping[str, float] = field(default_factory=dict)
    processors: int = 0
    uneven: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))
        sizes = [one.devices for one in self.links]
        if not sizes or any(b <= a or b % a for a, b in pairwise(sizes)):
            raise ValueError(f"links join {sizes} devices: give at least one, each a multiple of the one before")
        positive = {"memory": self.memory, "bandwidth": self.bandwidth, **self.compute, **self.rates}
        least: dict[str, float] = {"overhead": self.overhead, "processors": self.processors}
        for at, link in enumerate(self.links):
            positive |= {f"links[{at}].devices": link.devices, f"links[{at}].bandwidth": link.bandwidth}
            least |= {f"links[{at}].latency": link.latency, f"links[{at}].message": link.message or 0.0}
        for device, factors in self.uneven.items():
            if unknown := factors.keys() - _FACTORS:
                raise ValueError(f"uneven[{device}] has {', '.join(unknown)}: give {', '.join(sorted(_FACTORS))}")
            positive |= {f"uneven[{device}][{name!r}]": factor for name, factor in factors.items()}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} is {value!r}: give a positive number")
        for name, value in least.items():
            if not value >= 0:
                raise ValueError(f"{name} is {value!r}: give a number from 0 on")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.links[-1].devices

    def factor(self, name: str, device: int) -> float:
        """What a device has of `compute`, `memory`, `bandwidth` or `links`, in terms of the usual one."""
        return self.uneven.get(device, {}).get(name, 1.0)

    def flops(self, dtype: str) -> float:
        """The rate of `compute` for a dtype, such as `float32`.

        Raises:
            KeyError: It is not known; the known ones are named.
        """
        if dtype not in self.compute:
            raise KeyError(f"the hardware has no rate of compute for {dtype}: it has {', '.join(self.compute)}")
        return self.compute[dtype]

    def work(self, flops: float, nbytes: float, dtype: str, operation: str, device: int = 0) -> float:
        """The time of an operation that computes and reads and writes so much; a view takes none of a device.

        Args:
            operation: Its name, for `rates`, such as `aten.gelu.default`.
        """
        if not flops and not nbytes:
            return self.overhead if self.processors else 0.0
        rate = self.rates.get(operation.rpartition(".")[0])
        if rate is not None:
            return self.overhead + (flops or nbytes) / rate / self.factor("compute", device)
        computed = flops / self.flops(dtype) / self.factor("compute", device) if flops else 0.0
        return self.overhead + max(computed, nbytes / self.bandwidth / self.factor("bandwidth", device))

    def seconds(self, kind: str, received: float, members: Sequence[int]) -> float:
        """The time of a collective, or of a `send`, once all its members have come to it.

        Messages take a latency for each doubling of the members. The members inside of a group share its links to
        other groups, since each needs to bring in only its part; not so of all_to_all and send.

        Args:
            kind: As of `Collective`.
            received: Bytes that each member receives.
            members: Their ranks.
        """
        count, inside = len(members), 1
        if count < 2:
            return 0.0
        slowest = min(self.factor("links", one) for one in members) if self.uneven else 1.0
        latency = most = 0.0
        for link in self.links:
            near = math.ceil(count / len({one // link.devices for one in members}))
            if near > inside:
                is_own = kind in ("all_to_all", "send")
                outside = received * (count - inside) / (count - 1) if is_own else received / inside
                latency = link.message if kind == "send" and link.message is not None else link.latency
                most = max(most, outside / (link.bandwidth * slowest))
                inside = near
        return latency * math.ceil(math.log2(count)) + most

    def to_json(self) -> str:
        """The hardware as JSON, for `from_json`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, written: str) -> Hardware:
        """The hardware that `to_json` wrote, or that was written by hand.

        Raises:
            ValueError: It is no JSON, lacks a field, has an unknown one, or a number that is not positive.
        """
        given = json.loads(written)
        try:
            links = [Link(**one) for one in given.pop("links")]
            uneven = {int(device): factors for device, factors in given.pop("uneven", {}).items()}
            return cls(links=links, uneven=uneven, **given)
        except (AttributeError, KeyError, TypeError) as error:
            names = ", ".join(one.name for one in fields(cls))
            raise ValueError(f"hardware is an object of JSON with {names}: {error}") from None


_NODE: Final = Link(devices=8, bandwidth=3.6e11, latency=3e-6)
_H100: Final = Hardware(
    compute={"bfloat16": 6e14, "float16": 6e14, "float32": 4e14, "float64": 5e13},
    memory=80e9,
    bandwidth=2.8e12,
    overhead=4e-6,
    links=(_NODE,),
)
_RACK: Final = Link(devices=32, bandwidth=4.5e10, latency=8e-6)

PRESETS: Final[Mapping[str, Hardware]] = {
    "h100": _H100,
    "h100-racks": replace(_H100, links=(_NODE, _RACK, Link(devices=64, bandwidth=1.1e10, latency=1.5e-5))),
}
"""Hardware by name, at rates that programs reach: 8 H100 with NVLink; and 2 racks of 4 such nodes, with 400 Gb/s for
each device in a rack and a quarter of it between them."""
