"""Arguments of a captured call, encoded once: constants, and the places of values that each run brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.encoder import Names, encode, is_plain
from aiodaft._runtime.serialization.tensors import Places
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.calls.call import Target
    from aiodaft._runtime.objects.store import Store
    from aiodaft._runtime.peer import Peer
    from aiodaft.methods import MethodSpec


class Arguments:
    """A method, and its arguments. Travels to the process of its actor; not a dataclass, so that refs stay refs."""

    __slots__ = ("blob", "flat", "method", "outside", "payload", "refs", "slots")

    def __init__(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: dict[Any, int]
    ) -> None:
        """Encode arguments; `numbers` are those of the values that the graph's own refs stand for.

        Raises:
            SerializationError: A constant cannot travel.
            TypeError: A ref of the graph is where only the method itself could find it.
        """
        self.method = spec.name
        self.outside: list[Ref[Any]] = []
        # Refs inside objects that are no plain containers.
        self.refs: list[Ref[Any]] = []
        self.payload = b""
        self.blob: bytes | None = None
        # Positional arguments where each is a slot (True, number) or needs no decoding (False, constant).
        self.flat: tuple[tuple[bool, Any], ...] | None = None
        if not kwargs and all(is_plain(arg) or _is_slot(arg, target.peer) for arg in args):
            slot = iter(range(len(args)))
            self.flat = tuple((True, next(slot)) if isinstance(arg, Ref) else (False, arg) for arg in args)
            slots = [arg for arg in args if isinstance(arg, Ref)]
        else:
            slots = self._encode(target, spec, args, kwargs)
        if any(ref._state in numbers for ref in self.refs):
            raise TypeError(f"{spec.label}: a ref of the graph is inside an object that is no plain container")
        # For each slot the number of a value; or, counted down from -1, of a ref from outside.
        self.slots = tuple(self._number_of(ref, numbers) for ref in slots)

    def _encode(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Ref[Any]]:
        parts = [(spec.argument(index), arg) for index, arg in enumerate(args)]
        names, places = Names(spec.label, (*parts, *kwargs.items()), target.label), Places(home=target.peer.process)
        encoded = encode([list(args), kwargs], names=names, places=places, resolve=True, patient=True)
        self.payload, self.blob = encoded.payload, encoded.packed()
        self.refs = encoded.refs
        return encoded.slots

    def _number_of(self, ref: Ref[Any], numbers: dict[Any, int]) -> int:
        number = numbers.get(ref._state)
        if number is None:
            self.outside.append(ref)
            number = -len(self.outside)
        return number

    @property
    def needs(self) -> tuple[int, ...]:
        """Numbers of the graph's values that they are made of."""
        return tuple(number for number in self.slots if number >= 0)

    def make(self, store: Store, values: list[Any], *, patient: bool) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one run, from the values of the slots. Nothing of them is shared with other runs."""
        if self.flat is not None:
            return [values[part] if is_slot else part for is_slot, part in self.flat], {}
        blobs = [] if self.blob is None else [memoryview(bytearray(self.blob))]
        arrived = ReceivedValue(self.payload, None, blobs, self.refs)
        args, kwargs = store.decode_now(arrived, values, self.refs, patient=patient)
        return args, kwargs


def _is_slot(value: Any, peer: Peer) -> bool:
    if not isinstance(value, Ref):
        return False
    state = state_of(value)
    return state.parts() is None and state.process is peer.process


class Sealed:
    """Something that travels as it is: nobody looks for refs in it that stand for values."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<{type(self.content).__name__}>"
