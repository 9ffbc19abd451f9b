"""The names of GPUs: those that CUDA has for the ones a process may use, and those that the machine has. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


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

    A GPU that is declared and not there has a number that no GPU has.

    Args:
        machine: All GPUs.
        allowed: CUDA_VISIBLE_DEVICES.
        declared: Their number, if the user gives it.
    """
    visible = _visible(allowed or "", machine)
    if declared is None:
        return [str(gpu) for gpu in range(len(machine))] if allowed is None else visible
    # `Resources` refuses anything but a number that is not negative.
    count = max(0, declared) if isinstance(declared, int) else 0
    others = map(str, itertools.count(len(machine) if visible else 0))
    return list(itertools.islice(itertools.chain(visible, (name for name in others if name not in visible)), count))


def device_named(name: str, machine: Sequence[Gpu]) -> str:
    """The device for which a GPU with this name in CUDA is claimed; "" if the machine does not have it."""
    if name.isdecimal():
        return machine[int(name)].device if int(name) < len(machine) else ""
    # CUDA also takes the beginning of an id.
    found = next((gpu.device for gpu in machine if gpu.uuid.startswith(name)), "")
    # A part of a GPU, or an id that is not known here, stands for itself.
    is_unknown = name.startswith("MIG-") or any(not gpu.uuid for gpu in machine)
    return found or (name if machine and is_unknown else "")


def _visible(allowed: str, machine: Sequence[Gpu]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES that count: those before the first one that names no GPU, as CUDA has it."""
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
