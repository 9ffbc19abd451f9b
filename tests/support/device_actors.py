"""Actors with tensors on devices that are memory of the host."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator
from typing import Any

from actors import Box
from here import current_peer
from host_devices import Gate, use_host_devices
from tensor_keepers import TensorKeeper
from torch import Tensor

import aiodaft
from aiodaft import method


class DeviceKeeper(TensorKeeper):
    """Has one device, or none."""

    def __init__(self, *devices: int) -> None:
        self.peer = current_peer()
        self.driver = use_host_devices(*devices)
        self.tensor: Any = None
        self.gate: Gate | None = None

    def _make(self, size: int, value: float) -> Tensor:
        self.tensor = self.driver.tensor(size).fill_(value)
        return self.tensor

    @method
    async def make_slowly(self, size: int, value: float) -> Tensor:
        """Its result is computed when the gate opens, and overwritten right afterwards."""
        tensor = self._make(size, 0.0)
        self.gate = self.driver.hold()
        self.driver.enqueue(0, lambda: tensor.fill_(value))
        return tensor

    @method
    async def overwrite_behind(self, value: float) -> None:
        tensor = self.tensor
        self.driver.enqueue(0, lambda: tensor.fill_(value))

    @method
    async def open_gate(self) -> None:
        assert self.gate is not None
        self.gate.open = True

    @method
    async def several(self, size: int) -> list[Tensor]:
        """In one value: host and device, two looks at the same memory, gaps, and nothing at all."""
        import torch

        base = self._make(size, 1.0)
        other = self.driver.tensor(size).fill_(2.0)
        return [torch.full((size,), 3.0), base, base[10:20], other[::2], base[:0], torch.zeros(0)]

    @method
    async def overwrite(self, value: float) -> None:
        self.tensor.fill_(value)

    @method
    async def items(self, count: int, lent: bool) -> AsyncGenerator[Tensor, None]:
        for value in range(count):
            tensor = self.driver.tensor(1000).fill_(float(value))
            yield aiodaft.borrow(tensor) if lent else tensor

    @method
    async def where(self, tensor: Tensor) -> tuple[int | None, float]:
        """The device of a tensor here, and the sum of the tensor."""
        devices = self.peer.store.devices
        return devices.kind.device_of(tensor), float(tensor.sum())

    @method
    def sum_on_thread(self, tensor: Tensor) -> float:
        return float(tensor.sum())

    @method
    async def add_in_place(self, tensor: Tensor, value: float) -> float:
        tensor.add_(value)
        return float(tensor[0])

    @method
    @aiodaft.memory.read_only
    async def peek(self, tensor: Tensor) -> float:
        """The sum of a tensor, which is not copied for it."""
        return float(tensor.sum())

    @method
    @aiodaft.memory.read_only
    def peek_on_thread(self, tensors: list[Tensor], *, factor: float) -> float:
        return sum(float(tensor.sum()) for tensor in tensors) * factor

    @method
    def use_stream(self, stream: int) -> None:
        """From now on, the actor's thread uses a stream, which is busy until the gate opens."""
        self.driver.current_stream = stream
        self.gate = self.driver.hold(stream)

    @method
    def pass_on(self, other: DeviceKeeper, size: int) -> tuple[int | None, float]:
        """Another actor's answer about a tensor that a stream of this thread makes late, and then overwrites."""
        tensor = self._make(size, 0.0)
        self.use_stream(5)
        self.driver.enqueue(5, lambda: tensor.fill_(3.0))
        found = other.where(tensor)
        self.driver.enqueue(5, lambda: tensor.fill_(9.0))
        sent = threading.Event()
        self.peer.process.call_soon(sent.set)
        sent.wait()
        assert self.gate is not None
        self.gate.open = True
        return found.result()

    @method
    def pass_with(self, other: DeviceKeeper, ref: Box) -> tuple[int | None, float]:
        """The same of a tensor in a list, next to a ref of a tensor."""
        return other.first_of([self._make(10, 4.0), ref.ref]).result()

    @method
    async def first_of(self, tensors: list[Tensor]) -> tuple[int | None, float]:
        return self.peer.store.devices.kind.device_of(tensors[0]), sum(float(tensor.sum()) for tensor in tensors)

    @method
    @aiodaft.memory.read_only
    def read_on_thread(self, tensor: Tensor) -> float:
        return float(tensor.sum())

    @method
    @aiodaft.memory.read_only
    async def hold_on(self, tensor: Tensor) -> None:
        """Keep a part of it."""
        self.tensor = tensor[1:]

    @method
    async def let_go(self) -> float:
        first, self.tensor = float(self.tensor[0]), None
        return first

    @method
    @aiodaft.memory.read_only
    async def break_promise(self, tensor: Tensor) -> None:
        tensor.add_(1.0)

    @method
    async def traffic(self) -> dict[str, int]:
        traffic = self.peer.connections.traffic()
        return {
            "payload": traffic.payload_sent,
            "device": traffic.device_sent,
            "received": traffic.device_received,
            "copied": self.driver.copied,
        }

    @method
    async def die(self) -> None:
        os.abort()

    @method
    async def limit_memory(self, nbytes: int) -> None:
        """Let no more than this fit onto the device."""
        self.driver.memory_left = nbytes

    @method
    async def blocks(self) -> int:
        return self.peer.store.devices.transport.live_blocks()


class Reader:
    """A plain class, to be hosted by an actor with a device."""

    def __init__(self) -> None:
        use_host_devices(0)

    @aiodaft.memory.read_only
    def total(self, tensor: Tensor) -> float:
        return float(tensor.sum())

    @staticmethod
    @aiodaft.memory.read_only
    def write(tensor: Tensor) -> None:
        tensor.add_(1.0)
