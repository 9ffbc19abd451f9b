"""The runtime: the outermost scope, which owns every process, link and value.

In a script `async with aiodaft.Runtime() as rt`; in a notebook `rt = await aiodaft.start()`; in a web server inside
its lifespan. The node agent and the coordinator live in this process, so nothing else has to run and nothing listens.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from aiodaft._protocol.ids import COORDINATOR, NODE, SUPERVISOR, ActorId, PeerId
from aiodaft._protocol.ledger import Resources
from aiodaft._protocol.liveness import Patience
from aiodaft._protocol.naming import check_name as check_actor_name
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft._runtime.diagnostics.attach import answer
from aiodaft._runtime.node.all_stacks import stack_of_all
from aiodaft._runtime.node.coordinator import Coordinator
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.pid_namespace import prefix_of
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.gpu_claims import GpuClaims, gpu_names, id_named
from aiodaft._runtime.platform.tasks import shield_from_anyio
from aiodaft._runtime.process import ProcessOptions, closed, opened
from aiodaft._runtime.serialization.errors import give_frames, take_frames
from aiodaft._runtime.supervision.directory import Directory
from aiodaft.actor import Actor, Handle, class_of
from aiodaft.exceptions import DaftError, OutcomeUnknown, ProtocolError, RuntimeClosed
from aiodaft.ref import Ref
from aiodaft.scope import Scope, handle_of
from aiodaft.stack import RuntimeStack
from aiodaft_transport import Key, check_name, default_name

__all__ = ["Runtime", "has_uvloop"]

T = TypeVar("T")
ActorT = TypeVar("ActorT", bound=Actor)


class Runtime(Scope):
    """Owns actors, their processes, and everything between them.

    It is no nursery, unlike the scopes inside it (`rt.scope()`): an error that no code will see, of a call whose ref
    was dropped or of an actor that died while no call was under way, is logged at once with its traceback, and the
    block goes on. When the block ends, these errors and those that still wait in refs are raised in an ExceptionGroup:
    the first 100, with a count of the others. A block that ends by a cancellation or SystemExit raises just that.

    Args:
        cpus: CPUs of this machine; those this process may use, unless said.
        gpus: GPUs of this machine; detected, unless said. Say it to develop without any.
        share_gpus: Whether other runtimes may give the same GPUs to their actors at the same time. By default a runtime
            claims each GPU of the machine while an actor has it: another runtime gives its actors another GPU, or
            raises `InsufficientResources`, which names the process. An actor that opens a runtime on its own GPUs
            needs True there.
        resources: Other things to count, as in `{"disk": 2}`; actors ask for them by `rt.on(resources=...)`.
        transport: How payloads travel: "shm", "ucx" or "tcp"; the best one, unless said (or by $AIODAFT_TRANSPORT).
            Unless said, CUDA tensors go from GPU to GPU.
        preload: Modules that workers share instead of each importing them; numpy and torch, unless said, if they are
            loaded here.
        fork: False starts every worker by exec, for code that cannot live in a forked process.
        uvloop: Whether workers run on uvloop; yes where it is installed, unless said.
        isolation: "pidns" puts the actors into a PID namespace: whatever they start ends with their fork server,
            however that ends. Their own `os.getpid()` is then not what others see.
        stop_grace: Seconds that calls under way get when their actor is stopped.
        cancel_grace: Seconds that cancelled calls get for their cleanup. A `def` method that already runs gets none: a
            thread cannot be interrupted.
        max_pending: Calls to one process that may be without an answer before `Overloaded` is raised: those that are
            under way there, and those that wait here to be sent. The runtime's own calls (`rt.info`, `rt.stop`) do not
            count, and always get through.
        patience: How long a process that does not answer is waited for: by default it is reported after 5 s, and killed
            after 30 s if it is stopped. A class line or `rt.on(patience=...)` goes before this.
        unhandled: "raise": errors that no code has seen are logged, and raised when the block ends. "log": they are
            only logged, as a server needs it, which goes on for months; no error is kept.
        env: Clock, randomness and ids, for simulations.

    Raises:
        Unreachable: The transport cannot work on this machine.
        SpawnFailed: The isolation cannot be had on it.
    """

    def __init__(
        self,
        *,
        cpus: float | None = None,
        gpus: int | None = None,
        share_gpus: bool = False,
        resources: Mapping[str, float] | None = None,
        transport: str | None = None,
        preload: tuple[str, ...] | None = None,
        fork: bool | None = None,
        uvloop: bool | None = None,
        isolation: str | None = None,
        stop_grace: float = 5.0,
        cancel_grace: float = 2.0,
        max_pending: int = 1_000_000,
        patience: Patience | None = None,
        unhandled: Literal["raise", "log"] = "raise",
        env: Env | None = None,
    ) -> None:
        super().__init__(self)
        if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
            raise ValueError(f"max_pending={max_pending!r}: a positive integer is needed")
        for name, value in {"stop_grace": stop_grace, "cancel_grace": cancel_grace}.items():
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: a number that is not negative is needed")
        if unhandled not in {"raise", "log"}:
            raise ValueError(f'unhandled={unhandled!r} is neither "raise" nor "log"')
        self._raises_unhandled = unhandled == "raise"
        # Of the errors that are kept for the end.
        self._frames: list[tuple[BaseException, Any]] = []
        self.stop_grace = stop_grace
        self.cancel_grace = cancel_grace
        asked = transport or os.environ.get("AIODAFT_TRANSPORT")
        self._transport = check_name(asked or default_name())
        self._direct = not asked
        self._max_pending = max_pending
        self._isolation = prefix_of(isolation)
        self._patience = patience or Patience()
        self._preload = preload
        self._fork = sys.platform == "linux" if fork is None else fork
        self._uvloop = has_uvloop() if uvloop is None else uvloop
        self._env = env or Env()
        self.node_name = self._env.hostname()
        machine = self._env.gpus()
        self._gpu_names = gpu_names(machine, gpus)
        self._claims = GpuClaims([] if share_gpus else [id_named(name, machine) for name in self._gpu_names])
        self._ledger: Resources[ActorId] = Resources(
            cpus=len(os.sched_getaffinity(0)) if cpus is None else cpus,
            gpus=len(self._gpu_names) if gpus is None else gpus,
            custom=resources,
            claims=self._claims,
        )
        self._labels: Counter[str] = Counter()
        self._peer: Peer | None = None
        self._launcher: WorkerLauncher | None = None
        self._ended: str | None = None
        # This is a forked child of the process that has it.
        self.stayed_behind = False

    # The block.

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._open()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(error_type, error, traceback)
        finally:
            with shield_from_anyio():
                await self._shut()

    async def aclose(self) -> None:
        """Close a runtime that was opened without a block. Idempotent.

        Raises:
            BaseExceptionGroup: Errors that no code has seen, unless they are only logged.
        """
        if self._ended is None:
            await self.__aexit__(None, None, None)

    def _open(self) -> None:
        if self._peer is not None:
            raise RuntimeClosed("a runtime is opened once; make a new one")
        loop = asyncio.get_running_loop()
        peer_id = self._env.new_peer_id("controller")
        options = ProcessOptions(
            id=peer_id,
            node=self.node_name,
            home=peer_id,
            transport=self._transport,
            direct=self._direct,
            grace=self.cancel_grace,
            max_pending=self._max_pending,
        )
        peer = self._peer = Peer(options, Key(self._env.token(32)), self._env)
        launcher: Callable[..., WorkerLauncher] = self._env.launcher or WorkerLauncher
        self._launcher = launcher(loop, fork=self._fork, preload=self._preload, prefix=self._isolation)
        names = self._gpu_names
        agent = NodeAgent(peer, self._launcher, self._ledger, names, uvloop=self._uvloop, patience=self._patience)
        agent.on_died = self._actor_died
        agent.on_unheld = self.fail
        agent.on_ended = self._process_ended
        peer.add_actor(NODE, "node agent", agent)
        peer.add_actor(COORDINATOR, "coordinator", Coordinator())
        peer.objects.on_unheld = self.fail

        async def explain(connection: Connection, reason: Exception) -> DaftError:
            ending = await agent.explain(connection.remote, peer.graphs.in_flight(connection))
            # Who talks nonsense is cut off, and ends: why is what the callers have to hear.
            return reason if isinstance(reason, ProtocolError) else ending

        peer.connections.explain = explain
        self._launcher.on_rung = self._answer_door
        self.node = peer.node_agent()
        self.coordinator = cast("Coordinator", peer.handle(peer_id, COORDINATOR, "coordinator", Coordinator))
        self.supervisor = Directory(peer)
        self.supervisor.on_over = lambda number: self.coordinator.release.tell(peer_id, number)
        peer.add_actor(SUPERVISOR, "supervisor", self.supervisor)
        peer.on_forked = self._stay_behind
        opened(peer.process, peer.stay_behind)
        self._left_open = weakref.finalize(self, _warn_left_open)

    def _end(self, why: str) -> tuple[Peer, WorkerLauncher] | None:
        """It is not open any more; what there is to be closed, unless that was done."""
        if self._ended is not None:
            return None
        self._ended = why
        if self._peer is None or self._launcher is None:
            return None
        self._left_open.detach()
        closed(self._peer.process)
        return self._peer, self._launcher

    async def _shut(self) -> None:
        parts = self._end("the runtime is closed")
        if parts is not None:
            peer, launcher = parts
            try:
                await peer.aclose("the runtime is closed")
            finally:
                await launcher.aclose()
                self._claims.close()

    def abandon(self) -> None:
        """End the processes of a runtime whose loop is gone. Blocks until they are."""
        why = "the event loop it was opened on is gone"
        parts = self._end(why)
        if parts is not None:
            peer, launcher = parts
            peer.abandon(why)
            launcher.abandon()
            self._claims.close()

    def _stay_behind(self) -> None:
        parts = self._end("it stayed behind in the process that this one was forked from")
        if parts is not None:
            self.stayed_behind = True
            _, launcher = parts
            launcher.stay_behind()
            self._claims.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was open and is not any more."""
        return self._ended is not None

    @property
    def is_stranded(self) -> bool:
        """Whether the loop it was opened on is not here any more, so that nothing can be awaited there."""
        return self.stayed_behind or (self._peer is not None and not self._peer.process.loop.is_running())

    # What scopes need.

    @property
    def peer(self) -> Peer:
        """This process, as the runtime sees it.

        Raises:
            RuntimeClosed: The runtime is not open.
        """
        if self._peer is None or self._ended is not None:
            raise RuntimeClosed(self._ended or "the runtime is not open yet: use `async with aiodaft.Runtime() as rt`")
        return self._peer

    def check_running(self, what: str) -> None:
        """Raise RuntimeClosed unless the runtime is open and this is its loop."""
        if self._peer is None or self._ended is not None:
            raise RuntimeClosed(f"{what}: {self._ended or 'the runtime is not open yet'}")
        self.check_loop(what)

    def check_loop(self, what: str) -> None:
        """Raise RuntimeError unless this is the loop that the runtime was opened on."""
        if self._peer is None or (running := asyncio._get_running_loop()) is self._peer.process.loop:
            return
        if running is not None:
            raise RuntimeError(f"{what}: this is another event loop than the one the runtime was opened on")
        raise RuntimeError(
            f"{what} where no event loop runs: have the runtime's do it, by `loop.call_soon_threadsafe` or "
            "`asyncio.run_coroutine_threadsafe`"
        )

    def start_task(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that does not depend on the task that asks for it."""
        try:
            return self.peer.process.tasks.start(coro, name=name)
        except RuntimeClosed:
            coro.close()
            raise

    def new_label(self, cls: type) -> str:
        """What to call the next actor of a class."""
        self._labels[cls.__name__] += 1
        return f"{cls.__name__}-{self._labels[cls.__name__]}"

    def _process_ended(self, remote: PeerId, error: OutcomeUnknown, wanted: bool) -> None:
        if self._ended is None:
            self.coordinator.release.tell(remote, None)
            self.supervisor.process_ended(remote, error, wanted)

    def _actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        scope = self._owner_of(remote, actor)
        if scope is not None:
            scope.fail(error, "an actor died while no call was under way")

    # Errors that no code has seen.

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code will see: log it, and keep it for the end of the block."""
        if not self._comes_of_closing(error):
            log_error(what, error)
            if self._raises_unhandled and self._unhandled.add(error):
                self._frames += take_frames(error)

    def _errors_after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        if self._raises_unhandled and (error is None or isinstance(error, Exception)):
            give_frames(self._frames)
            return super()._errors_after(error)
        for state in self._unseen():
            assert state.error is not None
            log_error(f"{state.label} failed, and no code saw the error", state.error)
        return None

    # Values and names.

    def put(self, value: T, *, transport: str | None = None) -> Ref[T]:
        """A ref of a value of this process, to pass to many actors: it is encoded and moved once.

        A large value is copied by a helper thread; do not write to it before `await ref.ready()`.

        Args:
            value: Anything that can travel.
            transport: How it travels, if not as everything else.

        Raises:
            SerializationError: Part of it cannot travel.
            Unreachable: The transport cannot work here; says why.
        """
        self.check_running("a value cannot be put")
        return Ref(self.peer.refs.put(value, "put", None if transport is None else check_name(transport)))

    async def name(self, actor: object, name: str) -> None:
        """Give an actor a name by which `lookup` finds it; it is free again when the actor is gone.

        Raises:
            NameTaken: Another actor has it.
            ActorDied: The actor is gone.
            ValueError: Nothing can be called that.
        """
        check_actor_name(name)
        target, cls = self._target(actor), class_of(handle_of(actor))
        if self.supervisor.find(target) is None:
            # One that is gone would keep the name for ever.
            await self.peer.agent_of(target.remote).report(target.actor)
        await self.coordinator.register(name, *target.identity, target.label, _class_names(cls))

    async def lookup(self, name: str, cls: type[ActorT]) -> ActorT:
        """The actor with a name.

        Raises:
            NameNotFound: There is none.
            TypeError: It is of another class.
            ActorDied: It is gone for good.
        """
        found = await self.coordinator.lookup(check_actor_name(name))
        if _class_names(cls)[0] not in found.class_names:
            raise TypeError(f"{name!r} is {found.label}, which is no {cls.__name__}")
        supervised = found.peer == self.peer.process.id
        plain = Target(self.peer, found.peer, found.actor, found.label, self)
        return cast("ActorT", Handle(await self.supervisor.address(found.actor) if supervised else plain, cls))

    def traffic(self) -> Traffic:
        """What this process sent to actors and received from them, since the runtime was opened.

        Payloads that actors hand to each other do not come here, and are not counted.
        """
        return self.peer.connections.traffic()

    async def stack(self, *, patience: float = 1.0) -> RuntimeStack:
        """What every process is in the middle of: calls, await chains, threads, and which calls each waits for.

        `print(await rt.stack())` shows it; so does `aiodaft stack` in another terminal.

        Args:
            patience: Seconds that a process gets to answer. Of one that does not, because a method keeps its loop or
                its interpreter busy, the threads are shown all the same, unless it is stopped.

        Cancellation: nothing is lost.
        """
        self.check_running("there are no stacks")
        return await stack_of_all(self.peer, self.node, patience)

    def _answer_door(self, fork_server: int) -> None:
        async def text() -> str:
            return str(await self.stack())

        if self._peer is not None and self._ended is None:
            self._peer.process.tasks.create_task(answer(fork_server, text), name="show the stacks")

    async def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """What this machine has, and how much of each is free."""
        return await self.node.resources()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "aclose", "lookup", "name", "put", "resources", "stack", "traffic"]

    def __repr__(self) -> str:
        state = "closed" if self._ended else "not open" if self._peer is None else "open"
        name = "" if self._peer is None else f"{self._peer.process.id} "
        return f"<Runtime {name}{state}, {len(self._scope_actors)} actors>"


def _warn_left_open() -> None:
    warnings.warn("a runtime was left open: its actors end with it, and nobody waits for them", ResourceWarning, 2)


def has_uvloop() -> bool:
    """Whether uvloop is installed."""
    return importlib.util.find_spec("uvloop") is not None


def _class_names(cls: type) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
