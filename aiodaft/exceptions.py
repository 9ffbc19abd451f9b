"""Every error that aiodaft itself raises.

An error of a remote method arrives as its own type; these are the errors of the runtime::

    DaftError
    ├── SerializationError, CyclicGraph, ResourceExhausted, BorrowError, RemoteError
    ├── DeadlineExceeded, DeadlockDetected, CallCancelled, KeyFileError, CorruptState, LaunchFailed
    ├── Closed               you closed the object
    │   └── RuntimeClosed, ChannelClosed
    ├── NotDelivered         the call never ran
    │   └── Overloaded, InsufficientResources, SpawnFailed, StaleHandle, GroupChanged, NameTaken, NameNotFound,
    │       NotAuthenticated, VersionMismatch, LeaseLost, CoordinatorUnavailable
    ├── OutcomeUnknown       it may or may not have run
    │   ├── ActorDied
    │   │   └── RestartLimitReached
    │   └── PeerLost, OwnerDied
    └── ProtocolError
        └── LocalProtocolError, RemoteProtocolError
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from aiodaft.causes import tree_of
from aiodaft.html import page, tree


class DaftError(Exception):
    """Root of all errors that aiodaft raises itself.

    Attributes:
        executed: Whether the call ran: True, False (safe to retry) or None (unknown).
    """

    executed: bool | None = None

    def __init__(self, message: str = "", *, executed: bool | None = None) -> None:
        super().__init__(message)
        if executed is not None:
            self.executed = executed

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException rebuilds from positional arguments alone, which would lose or reject the keyword arguments.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))

    def _repr_html_(self) -> str:
        return page("The cause first", tree(tree_of(self)))

    def with_executed(self, executed: bool | None) -> Self:
        """Say whether the call ran, and return the error."""
        self.executed = executed
        return self


def _rebuild(cls: type[DaftError], args: tuple[Any, ...], state: dict[str, Any]) -> DaftError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class SerializationError(DaftError, TypeError):
    """A value cannot travel between processes. The message names the path to it, as in `args[0].cfg.fn`."""

    executed = False


class CyclicGraph(DaftError, ValueError):
    """The steps of a graph would wait for each other in a cycle; the message says which, and their source lines."""

    executed = False


class ResourceExhausted(DaftError):
    """The operating system refuses the descriptor, the memory or the thread that a value needs to travel.

    The message names the process, the limit, and the way to raise it. Only that value fails: its actor and all
    connections go on, and other values travel as soon as the process has room for them.
    """


class Closed(DaftError):
    """The object has been closed by you."""

    executed = False


class RuntimeClosed(Closed):
    """The runtime, or the scope that owned the actor, is closed."""


class ChannelClosed(Closed):
    """The channel was closed: nothing more can be sent, and everything sent has been received."""


class NotDelivered(DaftError):
    """The call never ran; trying again is safe."""

    executed = False


class Overloaded(NotDelivered):
    """Too many calls are without an answer (`Runtime(max_pending=...)`), or wait at the actor (`max_queue`)."""


class InsufficientResources(NotDelivered):
    """The resources do not exist or are in use; the message says how many exist and which actors have them."""


class SpawnFailed(NotDelivered):
    """The process of a new actor did not come up, or could not load the actor's class."""


class StaleHandle(NotDelivered):
    """The actor was restarted, and the handle does not follow: `rt.lookup(name, cls)` gives one that leads to it."""


class GroupChanged(NotDelivered):
    """The group has a new epoch, or will: the common work of its members is void.

    `current_group()` gives the group as it is now; there all members begin again.

    Attributes:
        group: The name of the group, or of the part of it.
    """

    group: str | None = None


class NameTaken(NotDelivered):
    """Another actor has this name."""


class NameNotFound(NotDelivered, LookupError):
    """No actor has this name."""


class NotAuthenticated(NotDelivered):
    """The process at the other end of a connection could not prove that it belongs to this cluster."""


class VersionMismatch(NotDelivered):
    """The releases of aiodaft, or the versions of Python, of this process and the cluster do not work together."""


class LeaseLost(NotDelivered):
    """The coordinator does not count the node among its members any more, or has ended the reservation of a name.

    An actor with a name refuses calls with this while that may be so: another one may have the name.
    """


class CoordinatorUnavailable(NotDelivered):
    """The coordinator cannot store anything now, or another one has taken its place.

    Calls between actors go on. A name or lease that cannot be stored was not granted; if that is not certain,
    `executed` is None.
    """


class OutcomeUnknown(DaftError):
    """Something broke while the call was under way: it may or may not have run.

    Attributes:
        actor: Name of the actor, or of all actors of its process.
        last_method: The oldest call that was under way there, such as "Model.step"; "" if none is known.
        last_method_for: Seconds for which it was under way; None if it had just been made.
        last_lines: The last lines that the process wrote to standard error.
    """

    actor: str = ""
    last_method: str = ""
    last_method_for: float | None = None
    last_lines: tuple[str, ...] = ()


class ActorDied(OutcomeUnknown):
    """The actor is gone: its process ended, or it was stopped.

    Attributes:
        exit_code: The exit code of the process, if it ended by itself.
        signal: Name of the signal that ended it, such as "SIGKILL".
        oom: Whether the kernel killed it for want of memory.
    """

    exit_code: int | None = None
    signal: str | None = None
    oom: bool = False


class RestartLimitReached(ActorDied):
    """The actor, or one of its siblings, died more often than its restart policy allows, and stays dead.

    Attributes:
        attempts: The end of each incarnation within the policy's period, oldest first: an `ActorDied`, or the error of
            its start. The notes have them all as text.
    """

    executed = False
    attempts: tuple[BaseException, ...] = ()


class PeerLost(OutcomeUnknown):
    """The connection to another process ended, or the process did not answer for longer than its `Patience`.

    In the second case it was killed: it was stopped for longer than `Patience(lost_after=...)`, or silent for longer
    than `Patience(give_up=...)`. The message says which.
    """


class OwnerDied(OutcomeUnknown):
    """The process that owned this ref ended, so the value was freed."""


class DeadlineExceeded(DaftError, TimeoutError):
    """The time given to a call is over."""


class WaitingCall(NamedTuple):
    """One call of a deadlock.

    Attributes:
        actor: Name of the actor.
        method: The method, such as "Model.step".
        line: The place at which it waits, as "file:line in function"; empty if it has not begun.
    """

    actor: str
    method: str
    line: str


class DeadlockDetected(DaftError):
    """Calls wait for each other, so none can continue. The youngest of them fails with this.

    Attributes:
        cycle: The calls: each waits for the next, the last one (which failed) for the first.
    """

    cycle: tuple[WaitingCall, ...] = ()


class CallCancelled(DaftError):
    """The remote call was cancelled, but not by the task that awaits it.

    Deliberately not an asyncio.CancelledError: a TaskGroup would take that for its own cancellation and swallow it.
    """


class RemoteError(DaftError):
    """A remote exception that cannot be rebuilt in this process.

    Attributes:
        type_name: Qualified name of the remote exception's class.
        traceback: The remote traceback, as text.
    """

    executed = True
    type_name: str = ""
    traceback: str = ""


class KeyFileError(DaftError, ValueError):
    """The key file of a cluster is missing, readable by others, or damaged; the message says what to do."""

    executed = False


class CorruptState(DaftError):
    """The stored state of the coordinator cannot be read, or is no state of a coordinator. It is left as it is."""

    executed = False


class LaunchFailed(DaftError):
    """A node of a cluster could not be started on a machine; the message says on which, and how its start ended."""

    executed = False


class BorrowError(DaftError):
    """A buffer that was lent by `borrow()`, `empty()` or `register()` was written to while others may read it."""


class ProtocolError(DaftError):
    """A message does not follow the protocol."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol: a bug in aiodaft."""


class RemoteProtocolError(ProtocolError):
    """The other process broke the protocol: it is no aiodaft process, or one of another version."""
