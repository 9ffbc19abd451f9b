"""The arguments of a captured call, encoded once: constants, and slots for the values that each run brings."""

from __future__ import annotations

from typing import Any

from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names, encode, is_plain
from aiodaft._runtime.serialization.tensors import Places
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref


class Arguments:
    """A method and its arguments; travels to the process of the actor. Not a dataclass, so that refs stay refs."""

    __slots__ = ("blob", "flat", "method", "outside", "payload", "refs", "slots")

    def __init__(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: dict[Any, int]
    ) -> None:
        """Encode arguments. `numbers` maps the states of the graph's own refs to the numbers of their values.

        Raises:
            SerializationError: A constant cannot travel.
            TypeError: A ref of the graph is inside an object that only the method itself could search.
        """
        self.method = spec.name
        self.outside: list[Ref[Any]] = []
        # Refs inside objects other than containers and records: the method gets the refs themselves.
        self.refs: list[Ref[Any]] = []
        self.payload = b""
        self.blob: bytes | None = None
        # Positional arguments that need no decoding: (True, position of a slot) or (False, constant).
        self.flat: tuple[tuple[bool, Any], ...] | None = None
        if not kwargs and all(is_plain(arg) or _is_slot(arg, target) for arg in args):
            slot = iter(range(len(args)))
            self.flat = tuple((True, next(slot)) if isinstance(arg, Ref) else (False, arg) for arg in args)
            slots = [arg for arg in args if isinstance(arg, Ref)]
        else:
            slots = self._encode(target, spec, args, kwargs)
        if any(ref._state in numbers for ref in self.refs):
            raise TypeError(f"{spec.label}: a ref of the graph is inside an object that is no container or record")
        # For each slot the number of a value of the graph; for refs from outside, numbers from -1 down.
        self.slots = tuple(self._number_of(ref, numbers) for ref in slots)

    def _encode(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Ref[Any]]:
        parts = [(spec.argument(index), arg) for index, arg in enumerate(args)]
        names, places = Names(spec.label, (*parts, *kwargs.items()), target.label), Places(home=target.caller.process)
        encoded = encode([list(args), kwargs], names=names, places=places, resolve=True)
        self.payload, self.blob = encoded.payload, encoded.packed()
        self.refs = encoded.refs
        return encoded.slots

    def _number_of(self, ref: Ref[Any], numbers: dict[Any, int]) -> int:
        number = numbers.get(ref._state)
        if number is None:
            self.outside.append(ref)
            number = -len(self.outside)
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_arguments, tuple(getattr(self, name) for name in self.__slots__)

    @property
    def needs(self) -> tuple[int, ...]:
        return tuple(number for number in self.slots if number >= 0)

    @property
    def is_bare(self) -> bool:
        """Whether the arguments are the values of the slots, and nothing else."""
        return self.flat is not None and all(is_slot for is_slot, _ in self.flat)

    def make(self, store: Store, values: list[Any], *, patient: bool) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one run, from the values of the slots. Runs share no mutable part of them."""
        if self.flat is not None:
            return [values[part] if is_slot else part for is_slot, part in self.flat], {}
        blobs = [] if self.blob is None else [memoryview(bytearray(self.blob))]
        received = ReceivedValue(self.payload, None, blobs, self.refs)
        args, kwargs = store.decode_now(received, values, self.refs, patient=patient)
        return args, kwargs


@builder
def _rebuild_arguments(*parts: Any) -> Arguments:
    arguments = Arguments.__new__(Arguments)
    for name, part in zip(Arguments.__slots__, parts, strict=True):
        setattr(arguments, name, part)
    return arguments


def _is_slot(value: Any, target: Target) -> bool:
    if not isinstance(value, Ref):
        return False
    state = state_of(value)
    return state.parts() is None and state.process is target.caller.process


@builder
class Opaque:
    """An argument that travels as it is: the encoder does not look for refs inside it."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<{type(self.content).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Opaque, (self.content,)
