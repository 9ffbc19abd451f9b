"""Calls with refs among plain arguments: the values get there without a question; see `_protocol.calls.handover`."""

from __future__ import annotations

from typing import Any

from aiodaft._protocol.calls.handover import IN_MESSAGE, PULLED, choose
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, Awaited
from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._protocol.objects.value import HERE
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.serialization.encoder import are_short, is_plain
from aiodaft.ref import Ref


def submit_with_refs(
    refs: RefTable, connection: Connection, state: CallState, args: tuple[Any, ...], *, admitted: bool = False
) -> bool:
    """Send a call if each argument is plain, or a ref with a value that need not be pulled; else return False.

    `admitted`: See `Session.submit`.
    """
    number, actor, name, consumer = state.number, state.target.actor, state.spec.name, connection.remote
    own = actor < FIRST_USER_ACTOR
    # With inputs, it was sent before.
    if not connection.has_room(own=own) or state.inputs is not None or not are_short(args):
        return False
    process = refs.process
    plain_args: list[Any] = list(args)
    awaited: list[Awaited] = []
    used: list[CallState] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, Ref):
            if is_plain(arg):
                continue
            return False
        known = state_of(arg)
        if known.process is not process:
            return False
        called = known if isinstance(known, CallState) else None
        producer = None if called is None else called.giver
        relayed = called is not None and called.is_relayed_to(consumer)
        way = choose(known.status is HERE and is_plain(known.value), producer, consumer, relayed=relayed)
        if way is PULLED:
            return False
        if way is IN_MESSAGE:
            plain_args[index] = known.value
            continue
        assert called is not None
        assert producer is not None
        plain_args[index] = None
        awaited.append((index, process.id, called.number, producer, called.origin))
        used.append(called)
    if not used:
        connection.submit(number, state, (CALL, number, actor, name, tuple(plain_args)), 0, admitted, own)
        return True
    for one in used:
        refs.use(one.number, one)
    state.inputs = [*used]
    # It waits for its arguments anyway: it goes together with the next messages.
    connection.flush_soon()
    connection.follow()
    message = m.apply(number, actor, name, tuple(plain_args), tuple(awaited))
    connection.submit(number, state, message, 0, admitted, own)
    for one in used:
        if one.producer != consumer:
            one.forward_to(consumer)
    return True
