"""Names of things. Ids are never reused: a late reply to call 7 must not answer a new call 7."""

from __future__ import annotations

from typing import Final, NewType

# A process: unique in its cluster and in time.
PeerId = NewType("PeerId", str)
# An actor within its process.
ActorId = NewType("ActorId", int)
# A call, and the value it will give: unique within the process that made the call.
CallId = NewType("CallId", int)

# Every process hosts two actors that serve its peers; the controller (or a node process) hosts two more.
AGENT: Final = ActorId(0)
CHANNELS: Final = ActorId(3)
NODE: Final = ActorId(1)
COORDINATOR: Final = ActorId(2)
FIRST_USER_ACTOR: Final = ActorId(16)
