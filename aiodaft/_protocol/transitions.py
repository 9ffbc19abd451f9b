"""The lookup in tables of states and events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def next_state(transitions: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT) -> StateT:
    """The state after an event.

    Raises:
        ValueError: The event cannot happen in that state.
    """
    try:
        return transitions[state, event]
    except KeyError:
        raise ValueError(f"{event} cannot happen in {state}") from None
