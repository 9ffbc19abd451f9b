"""Carries out the turns of calls of a group by several callers; `_protocol.groups.turns` decides.

The `TurnKeeper` of each process has the `Turns` of its members, and the `Lead` of each group whose rank 0 is here.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, Final, cast

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.groups.turns import Asked, Held, Key, Lead, Turns
from aiodaft._protocol.ids import TURNS, ActorId, PeerId, roster_at, roster_of
from aiodaft._runtime.actors.host import Enlisted, Host
from aiodaft._runtime.actors.hosted_actor import InboundCall, serving
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.groups.meeting_place import Whereabouts, target_of_member
from aiodaft.actor import Actor
from aiodaft.methods import method, specs_of

_LABEL: Final = "turns of calls"


class _LineToLead:
    def __init__(self, keeper: TurnKeeper, member: ActorId, lead: Whereabouts) -> None:
        self._keeper = keeper
        self._member = member
        self.lead = lead

    def ask(self, round_: Hashable, asked: Asked) -> None:
        self._tell("ask", round_, asked)

    def ended(self, key: Key) -> None:
        self._tell("ended", key)

    def gone(self, key: Key) -> None:
        self._tell("gone", key)

    def _tell(self, name: str, *args: Any) -> None:
        peer, actor = self.lead
        if not self._keeper.tell(peer, name, (actor, self._member, *args)):
            # Not now: the mailbox asks.
            self._keeper.process.call_soon(partial(self._keeper.lead_lost, self._member))


class _OrdersToMembers:
    def __init__(self, keeper: TurnKeeper, lead: ActorId) -> None:
        self._keeper = keeper
        self._lead = lead
        self.members: dict[ActorId, PeerId] = {}
        self.heard: dict[ActorId, PeerId] = {}

    def hold(self, round_: int) -> None:
        self._tell_all("hold", self._lead, round_)

    def grant(self, key: Key) -> None:
        self._tell_all("grant", key)

    def grant_one(self, member: Hashable, key: Key) -> None:
        actor = cast("ActorId", member)
        self._keeper.tell(self.heard[actor], "grant", (actor, key))

    def release(self, caller: PeerId) -> None:
        self._tell_all("release", caller)

    def open(self) -> None:
        self._tell_all("open")

    def _tell_all(self, name: str, *args: Any) -> None:
        for actor, peer in self.members.items():
            if not self._keeper.tell(peer, name, (actor, *args)):
                self._keeper.process.call_soon(partial(self._keeper.member_lost, self._lead))


class TurnKeeper(Actor):
    """The turns of the calls of the members in this process."""

    def __init__(self, caller: Caller, host: Host, enlisted: Enlisted) -> None:
        self.process = caller.process
        self._caller = caller
        self._host = host
        self._enlisted = enlisted
        self._turns: dict[ActorId, tuple[Turns, _LineToLead]] = {}
        self._leads: dict[ActorId, tuple[Lead, _OrdersToMembers]] = {}
        enlisted.on_told.append(self._told)
        enlisted.on_forgotten.append(self._forgotten)

    def tell(self, peer: PeerId, name: str, args: tuple[Any, ...]) -> bool:
        if peer != self.process.id and self._caller.connections.to(peer).lost is not None:
            return False
        Target(self._caller, peer, TURNS, _LABEL, None).tell(specs_of(TurnKeeper)[name], args, {})
        return True

    def gate_for(self, call: InboundCall) -> Turns | None:
        if not roster_of(call.number):
            return None
        actor = call.hosted.id
        if actor in self._turns:
            return self._turns[actor][0]
        standing = self._enlisted.find(actor)
        if standing is None or not standing.roster.is_complete:
            return None
        return self._turns_of(actor, standing.roster.owner, _lead_of(standing.roster))[0]

    def _turns_of(self, member: ActorId, owner: PeerId, lead: Whereabouts) -> tuple[Turns, _LineToLead]:
        if member not in self._turns:
            line = _LineToLead(self, member, lead)
            self._turns[member] = Turns(owner, line), line
        return self._turns[member]

    def look_again(self, actor: ActorId) -> None:
        hosted = self._host.actors.get(actor)
        if hosted is not None:
            hosted.look_again()

    def lead_lost(self, member: ActorId) -> None:
        found = self._turns.get(member)
        if found is not None:
            found[0].open()
            self.look_again(member)

    @method
    async def hold(self, member: ActorId, lead: ActorId, round_: int) -> None:
        asker, standing = serving().caller, self._enlisted.find(member)
        if standing is None:
            self.tell(asker, "unheld", (lead, round_))
            return
        # The member may learn later that this is the lead now.
        turns, line = self._turns_of(member, standing.roster.owner, (asker, lead))
        line.lead = asker, lead
        self.tell(asker, "held", (lead, member, round_, turns.hold(round_)))

    @method
    async def grant(self, member: ActorId, key: Key) -> None:
        if member in self._turns:
            self._turns[member][0].grant(key)
            self.look_again(member)

    @method
    async def release(self, member: ActorId, caller: PeerId) -> None:
        if member in self._turns:
            self._turns[member][0].release(caller)
            self.look_again(member)

    @method
    async def open(self, member: ActorId) -> None:
        self.lead_lost(member)

    def member_lost(self, lead: ActorId) -> None:
        found = self._leads.get(lead)
        if found is not None:
            found[0].give_up()

    @method
    async def ask(self, lead: ActorId, member: ActorId, round_: int, asked: Asked) -> None:
        found = self._leads.get(lead)
        if found is None:
            standing = self._enlisted.find(lead)
            if standing is None or standing.rank or not standing.roster.is_complete:
                self.tell(serving().caller, "open", (member,))
                return
            orders = _OrdersToMembers(self, lead)
            orders.members = _members_of(standing.roster)
            found = self._leads[lead] = Lead(orders.members, roster_at(standing.roster.epoch), orders), orders
        found[1].heard[member] = serving().caller
        found[0].ask(member, round_, asked)

    @method
    async def held(self, lead: ActorId, member: ActorId, round_: int, held: Held) -> None:
        if lead in self._leads:
            self._leads[lead][1].heard[member] = serving().caller
            self._leads[lead][0].held(member, round_, held)

    @method
    async def unheld(self, lead: ActorId, round_: int) -> None:
        if lead in self._leads and self._leads[lead][0].is_in(round_):
            self.member_lost(lead)

    @method
    async def ended(self, lead: ActorId, member: ActorId, key: Key) -> None:
        if lead in self._leads:
            self._leads[lead][0].ended(member, key)

    @method
    async def gone(self, lead: ActorId, member: ActorId, key: Key) -> None:
        if lead in self._leads:
            self._leads[lead][0].gone(key)

    def connection_lost(self, remote: PeerId) -> None:
        for member, (turns, line) in list(self._turns.items()):
            turns.forget(remote)
            if line.lead[0] == remote:
                self.lead_lost(member)
        for lead, orders in list(self._leads.values()):
            if remote in orders.members.values():
                lead.give_up()

    def _told(self, actor: ActorId) -> None:
        standing = self._enlisted.find(actor)
        if standing is None or not standing.roster.is_complete:
            return
        roster = standing.roster
        found, led = self._turns.get(actor), self._leads.get(actor)
        if found is not None and found[1].lead != _lead_of(roster):
            found[1].lead = _lead_of(roster)
            found[0].begin_again(roster.owner)
            self.look_again(actor)
        if led is not None and standing.rank:
            del self._leads[actor]
            led[0].give_up()
        elif led is not None:
            led[1].members, led[1].heard = _members_of(roster), {}
            led[0].change(led[1].members, roster_at(roster.epoch))

    def _forgotten(self, actor: ActorId) -> None:
        self._turns.pop(actor, None)
        led = self._leads.pop(actor, None)
        if led is not None:
            led[0].give_up()


def _members_of(roster: Roster[Any]) -> dict[ActorId, PeerId]:
    return {target.actor: target.remote for target in map(target_of_member, roster.members)}


def _lead_of(roster: Roster[Any]) -> Whereabouts:
    target = target_of_member(roster.members[0])
    return target.remote, target.actor
