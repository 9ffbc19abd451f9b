"""Types of values that the API returns, for annotations, and two functions that only type checkers need."""

from aiodaft.actor import local
from aiodaft.collectives import Survivors
from aiodaft.graph import StepTime
from aiodaft.member import CurrentGroup, Exchange, Message, Planned
from aiodaft.memory import Registration
from aiodaft.placement import Mesh, Placement, Slice, Spawned
from aiodaft.ref import lazy
from aiodaft.service import Service, ServiceGroup

__all__ = [
    "CurrentGroup",
    "Exchange",
    "Mesh",
    "Message",
    "Placement",
    "Planned",
    "Registration",
    "Service",
    "ServiceGroup",
    "Slice",
    "Spawned",
    "StepTime",
    "Survivors",
    "lazy",
    "local",
]
