"""The actor that every process has for its peers: it hosts, stops, and answers for refs. Called by ordinary calls."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.deadlock import CallAt, Waiting
from aiodaft._protocol.ids import ActorId, CallId, PeerId, incarnation
from aiodaft._protocol.mailbox import BoundedMailbox
from aiodaft._runtime.actors.hosted_actor import HostedActor, current_call
from aiodaft._runtime.diagnostics.process_stack import stack_here
from aiodaft._runtime.graphs.captured_call import Opaque
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, WaitingCall
from aiodaft.methods import PlainMethods, method, specs_of
from aiodaft.stack import ProcessStack

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer


# Running calls that are told one by one.
_SHOWN: Final = 100


class Agent(Actor):
    """Serves the other processes of the runtime."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @method
    async def host(
        self, actor: int, label: str, max_queue: int | None, cls: type, /, *args: Any, **kwargs: Any
    ) -> None:
        """Make an actor here. Its constructor runs on the actor's own thread, so that a slow one stalls nobody.

        Sent again, with the same arguments, it makes the next incarnation.
        """
        call = current_call.get()
        assert call is not None
        epoch = call.attempt
        specs = specs_of(cls) if issubclass(cls, Actor) else {}
        find_spec = specs.get if issubclass(cls, Actor) else PlainMethods(cls).find
        hosted = HostedActor(self._peer.host, incarnation(ActorId(actor), epoch), label, find_spec)
        if max_queue is not None or any(spec.rules.max_queue is not None for spec in specs.values()):
            hosted.mailbox = hosted.bounds = BoundedMailbox(max_queue)
        try:
            hosted.instance = await hosted.thread.run(lambda: cls(*args, **kwargs))
            await hosted.enter_instance()
            if epoch and issubclass(cls, Actor):
                await _tell_restarted(hosted, cls, epoch)
        except BaseException as error:
            hosted.thread.close()
            add_note(
                error,
                f"raised while {label} was made (pid {self._peer.process.pid}, {self._peer.process.options.node})",
            )
            raise
        self._peer.actors[hosted.id] = hosted

    @method
    async def stop(self, actor: int, reason: str, grace: float) -> None:
        """Stop an actor: see `HostedActor.stop`. Nothing if it is gone."""
        hosted = self._peer.actors.get(ActorId(actor))
        if hosted is not None:
            try:
                await hosted.stop(reason, grace)
            finally:
                self._peer.host.remove(hosted)

    @method
    async def report(self, actor: int) -> dict[str, Any]:
        """How an actor is doing."""
        hosted = self._peer.actors.get(ActorId(actor))
        if hosted is None:
            raise ActorDied("the actor was stopped", executed=False)
        calls = list(hosted.running)
        begun = [call.label for call in calls if call.begun]
        return {
            "running": tuple(begun[:_SHOWN]),
            "running_besides": len(begun[_SHOWN:]),
            # Calls of def methods wait for the actor's thread.
            "queued": hosted.mailbox.queued + len(calls) - len(begun),
            "done": hosted.done,
            "abandoned": len(hosted.abandoned),
            "stored_bytes": self._peer.store.stored_bytes(),
        }

    @method(ordered=False)
    async def answer(self) -> None:
        """This process is there, and so is the connection to it."""

    # Who waits for whom. No question waits for anything, so none of them stands in line.

    @method(ordered=False)
    async def investigate(self, roots: list[CallAt]) -> None:
        """To the home process: these calls have been in the way of others for a while."""
        self._peer.deadlocks.investigate(roots)

    @method(ordered=False)
    async def waits_of(self, calls: list[CallAt]) -> list[Waiting | None]:
        """What calls here wait for."""
        return [self._peer.deadlocks.waits.look(call) for call in calls]

    @method(ordered=False)
    async def give_up(self, at: CallAt, waiting: Waiting, story: str, cycle: tuple[WaitingCall, ...]) -> None:
        """End a deadlock by an error in a call that waits here, if it still does."""
        self._peer.deadlocks.give_up(at, waiting, story, cycle)

    @method(ordered=False)
    async def stack(self) -> ProcessStack:
        """What this process is in the middle of."""
        return stack_here(self._peer.deadlocks.waits)

    # Graphs of other processes.

    @method
    async def install(self, number: int, plan: Opaque) -> None:
        """Take part in a graph of the calling process; see `Graphs.install`."""
        await self._peer.graphs.install(_caller(), number, plan.content)

    @method
    async def uninstall(self, number: int) -> None:
        """Take no more part in it."""
        self._peer.graphs.uninstall(_caller(), number)

    # Refs that this process owns or keeps.

    @method
    async def borrow(self, number: int) -> None:
        """The calling process holds a ref of this one."""
        self._peer.refs.lend(CallId(number), _caller())

    @method
    async def give_back(self, number: int) -> None:
        """The calling process dropped a ref of this one."""
        self._peer.refs.take_back(CallId(number), _caller())

    @method
    async def cancel(self, number: int) -> None:
        """The calling process cancels a ref of this one."""
        state = self._peer.refs.find(CallId(number))
        if state is not None:
            state.cancel(f"{_caller()} asked for it")

    @method
    async def unread(self, owner: str, number: int) -> None:
        """Wait until no process reads a value that this one keeps."""
        kept = self._peer.store.entries.get((PeerId(owner), CallId(number)))
        if kept is not None:
            unread = asyncio.Event()
            kept.when_unread(unread.set)
            await unread.wait()


async def _tell_restarted(hosted: HostedActor, cls: type, epoch: int) -> None:
    """Have a new incarnation get back what it needs of the state of the one before."""
    hook: Any = getattr(cls, "on_restart", None)
    if hook is None:
        return
    if inspect.iscoroutinefunction(hook):
        await hook(hosted.instance, epoch)
    else:
        await hosted.thread.run(lambda: hook(hosted.instance, epoch))


def _caller() -> PeerId:
    call = current_call.get()
    assert call is not None
    return call.caller
