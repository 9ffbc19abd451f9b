"""The requests of a process to the coordinator for names of actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.coordination.records import NamedActor
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.node.worker import Tenant
from aiodaft._runtime.objects.ref_state import UnhandledErrors
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.tasks import logger
from aiodaft.actor import Handle
from aiodaft.exceptions import DaftError

# Seconds after which the coordinator is asked again.
_PAUSE: Final = 0.5


def class_names(cls: type) -> tuple[str, ...]:
    """The names of a class and its bases."""
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


@asynccontextmanager
async def reserved(owner: Owner, name: str, cls: type) -> AsyncGenerator[NamedActor]:
    """The actor with a name; or a reservation (`.reserved`), if there is none, which ends if the block raises.

    While another process makes an actor of that name, this waits.
    """
    tenant = owner.new_tenant()
    try:
        yield await owner.coordinator.get_or_reserve(NamedActor(name, *tenant, cls.__name__, class_names(cls)))
    except BaseException:
        if not owner.is_closed:
            # Also if it is not known whether it was granted.
            owner.process.create_task(_give_back(owner, name, tenant), name=f"give back the name {name!r}")
        raise


async def _give_back(owner: Owner, name: str, tenant: Tenant) -> None:
    # Others wait for it: also a coordinator that is started again has to know.
    while not owner.is_closed:
        try:
            await owner.coordinator.unreserve(name, *tenant)
        except DaftError as error:
            logger.debug("the name %r is not given back yet: %s", name, error)
            await asyncio.sleep(_PAUSE)
        else:
            return


async def register(owner: Owner, target: Target, cls: type, name: str, epoch: int = 0) -> None:
    """Give a name to an actor; `epoch`: that of the reservation, if there is one.

    Raises:
        NameTaken: Another actor has it.
        LeaseLost: The reservation is over, or the actor's node is not in the cluster.
    """
    supervised = isinstance(target, FollowingTarget)
    wanted = NamedActor(name, *target.identity, target.label, class_names(cls), supervised=supervised, epoch=epoch)
    granted = await owner.coordinator.register(wanted)
    await owner.nodes.of(granted.peer).named(granted)


async def found(owner: Owner, named: NamedActor, cls: type, sink: UnhandledErrors) -> Handle:
    """A handle of the actor with a name.

    Raises:
        TypeError: It is of another class.
        ActorDied: It is gone, and is not restarted.
    """
    if class_names(cls)[0] not in named.class_names:
        raise TypeError(f"{named.name!r} is {named.label}, which is no {cls.__name__}")
    if not named.supervised:
        return Handle(owner.target(named.peer, named.actor, named.label, sink), cls)
    if named.peer == owner.process.id:
        return Handle(await owner.directory.address(named.actor), cls)
    followed = owner.follow(named.peer, Location(NOWHERE, named.actor), named.label, sink)
    await followed.arrive()
    return Handle(followed, cls)
