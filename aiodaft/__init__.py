"""Distributed actors, futures and tasks for asyncio: one plain async program drives many processes and GPUs."""

from aiodaft import exceptions as exceptions
from aiodaft.actor import Actor as Actor
from aiodaft.actor import method as method
from aiodaft.channel import Channel as Channel
from aiodaft.deadline import deadline as deadline
from aiodaft.exceptions import (
    ActorDied as ActorDied,
)
from aiodaft.exceptions import (
    BorrowError as BorrowError,
)
from aiodaft.exceptions import (
    CallCancelled as CallCancelled,
)
from aiodaft.exceptions import (
    ChannelClosed as ChannelClosed,
)
from aiodaft.exceptions import (
    DaftError as DaftError,
)
from aiodaft.exceptions import (
    DeadlineExceeded as DeadlineExceeded,
)
from aiodaft.exceptions import (
    InsufficientResources as InsufficientResources,
)
from aiodaft.exceptions import (
    NameNotFound as NameNotFound,
)
from aiodaft.exceptions import (
    NameTaken as NameTaken,
)
from aiodaft.exceptions import (
    Overloaded as Overloaded,
)
from aiodaft.exceptions import (
    OwnerDied as OwnerDied,
)
from aiodaft.exceptions import (
    PeerLost as PeerLost,
)
from aiodaft.exceptions import (
    RemoteError as RemoteError,
)
from aiodaft.exceptions import (
    RuntimeClosed as RuntimeClosed,
)
from aiodaft.exceptions import (
    SerializationError as SerializationError,
)
from aiodaft.exceptions import (
    SpawnFailed as SpawnFailed,
)
from aiodaft.graph import Graph as Graph
from aiodaft.graph import compile as compile
from aiodaft.group import Group as Group
from aiodaft.memory import empty as empty
from aiodaft.placement import Placement as Placement
from aiodaft.placement import Spawned as Spawned
from aiodaft.ref import Ref as Ref
from aiodaft.ref import Refs as Refs
from aiodaft.ref import Stream as Stream
from aiodaft.ref import borrow as borrow
from aiodaft.ref import lazy as lazy
from aiodaft.runtime import Runtime as Runtime
from aiodaft.runtime import run as run
from aiodaft.runtime import start as start
from aiodaft.runtime import stop as stop
from aiodaft.scope import ActorInfo as ActorInfo
from aiodaft.scope import Scope as Scope
from aiodaft.service import Service as Service
from aiodaft.web import cancel_on_disconnect as cancel_on_disconnect

__version__ = "0.1.0"
