"""Calls with refs among plain arguments: the values get there without a question; see `_protocol.handover`."""

from __future__ import annotations

from typing import Any, cast

from aiodaft._protocol.calls.handover import FORWARDED, IN_MESSAGE, PULLED, Way, choose
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, Message
from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId
from aiodaft._protocol.objects.value import HERE
from aiodaft._runtime.calls.call import CallState, Request
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft.ref import Ref


def submit_with_refs(refs: RefTable, connection: Connection, request: Request) -> bool:
    """Send a call if each argument is plain, or a ref with a value that need not be pulled; else return False."""
    target, state, number = request.target, request.state, request.number
    if target.actor < FIRST_USER_ACTOR or request.stored is not None:
        return False
    if not (connection.connected and connection.session.has_room):
        return False
    args: list[Any] = list(request.args)
    used: list[tuple[int, CallState, Way]] = []
    for index, arg in enumerate(args):
        if is_plain(arg):
            continue
        if not isinstance(arg, Ref) or (known := state_of(arg)).process is not target.process:
            return False
        way = _way_of(known, connection.remote)
        if way is PULLED:
            return False
        args[index] = known.value if way is IN_MESSAGE else None
        if way is not IN_MESSAGE:
            used.append((index, cast("CallState", known), way))
    message: Message = (CALL, number, target.actor, request.spec.name, tuple(args))
    if used:
        awaited = tuple((index, *refs.describe_state(one)) for index, one, _ in used)
        message = m.apply(number, target.actor, request.spec.name, tuple(args), awaited)
        for _, one, _ in used:
            one.add_use()
        state.inputs = [one for _, one, _ in used]
        # It waits for its arguments anyway: it goes together with what follows.
        connection.flush_soon()
    connection.submit(number, state, message, 0, request.had_turn)
    for _, one, way in used:
        if way is FORWARDED:
            one.forward_to(connection.remote)
    return True


def _way_of(state: RefState, consumer: PeerId) -> Way:
    plain = state.status is HERE and is_plain(state.value)
    return choose(plain=plain, producer=state.at_work if isinstance(state, CallState) else None, consumer=consumer)
