"""Calls with refs among plain arguments: the values get there without a question; see `_protocol.handover`."""

from __future__ import annotations

from typing import Any, cast

from aiodaft._protocol.calls.handover import IN_MESSAGE, PULLED, choose
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, Awaited
from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._protocol.objects.value import HERE
from aiodaft._runtime.calls.call import CallState, Request
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.serialization.encoder import are_short, is_plain
from aiodaft.ref import Ref


def submit_with_refs(refs: RefTable, connection: Connection, request: Request) -> bool:
    """Send a call if each argument is plain, or a ref with a value that need not be pulled; else return False."""
    state, number, actor, consumer = request.state, request.number, request.target.actor, connection.remote
    own = actor < FIRST_USER_ACTOR
    has_room = connection.has_room_for_own if own else connection.has_room
    if not has_room or request.stored is not None or not are_short(request.args):
        return False
    submit = connection.submit_own if own else connection.submit
    local = refs.process.id
    args: list[Any] = list(request.args)
    awaited: list[Awaited] = []
    used: list[CallState] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, Ref):
            if is_plain(arg):
                continue
            return False
        known = state_of(arg)
        if known.process is not refs.process:
            return False
        plain = known.status is HERE and is_plain(known.value)
        producer = known.giver if isinstance(known, CallState) else None
        way = choose(plain, producer, consumer, relayed=isinstance(known, CallState) and known.is_relayed_to(consumer))
        if way is PULLED:
            return False
        if way is IN_MESSAGE:
            args[index] = known.value
        else:
            args[index] = None
            awaited.append((index, local, known.number, cast("PeerId", producer), known.origin))
            used.append(cast("CallState", known))
    if not used:
        submit(number, state, (CALL, number, actor, request.spec.name, tuple(args)), 0, request.had_turn)
        return True
    for one in used:
        refs.use(one.number, one)
    state.inputs = [*used]
    # It waits for its arguments anyway: it goes together with what follows.
    connection.flush_soon()
    connection.follow()
    message = m.apply(number, actor, request.spec.name, tuple(args), tuple(awaited))
    submit(number, state, message, 0, request.had_turn)
    for one in used:
        if one.producer != consumer:
            one.forward_to(consumer)
    return True
