"""The runtime: the outermost scope, which owns every process, connection and value.

A script uses `async with aiodaft.Runtime() as rt`, a notebook `rt = await aiodaft.start()`; a web server opens it in
its lifespan. The node agent and the coordinator live in this process: no other service is needed, and none listens.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.node.naming import check_name as check_actor_name
from aiodaft._protocol.node.resources import Resources, gpu_names, id_named
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft._runtime.controller import Controller, ControllerOptions
from aiodaft._runtime.node.pid_namespace import prefix_of
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.gpu_claims import GpuClaims
from aiodaft._runtime.platform.tasks import shield_from_anyio
from aiodaft._runtime.process import ProcessOptions
from aiodaft._runtime.serialization.errors import give_frames, take_frames
from aiodaft.actor import Actor, Handle, class_of
from aiodaft.exceptions import OutcomeUnknown
from aiodaft.ref import Ref
from aiodaft.scope import Scope, handle_of
from aiodaft.stack import RuntimeStack
from aiodaft_transport import check_name, default_name

__all__ = ["Runtime", "has_uvloop"]

T = TypeVar("T")
ActorT = TypeVar("ActorT", bound=Actor)


class Runtime(Scope):
    """Owns actors, their processes, and everything between them.

    Unlike the scopes inside it (`rt.scope()`), it does not cancel its block for an error that no code will see: the
    error of a call with a dropped ref, or of an actor that died while no call was under way. It logs the error with its
    traceback, and the block goes on. When the block ends, it raises these errors and the unseen errors of refs in an
    ExceptionGroup: the first 100, and the number of the others. A block that ends by a cancellation or SystemExit
    raises only that.

    Args:
        cpus: CPUs to offer. Default: the process's affinity.
        gpus: GPUs to offer. Default: all GPUs of the machine. Give a number to develop without GPUs.
        share_gpus: Whether other runtimes may give the same GPUs to their actors at the same time. By default a runtime
            claims each GPU of the machine while an actor has it: another runtime gives its actors another GPU, or
            raises `InsufficientResources`, which names the process. An actor that opens a runtime on its own GPUs
            needs True there.
        resources: Other resources, such as `{"disk": 2}`; actors reserve them by `rt.on(resources=...)`.
        transport: The transport of payloads: "shm", "ucx" or "tcp". Default: $AIODAFT_TRANSPORT, or the best of the
            machine; then CUDA tensors go from GPU to GPU.
        preload: Modules that workers share instead of each importing them. Default: numpy and torch, if they are
            loaded here.
        fork: False starts every worker by exec, for code that fails in a forked process.
        uvloop: Whether workers run on uvloop. Default: if it is installed.
        isolation: "pidns" puts the actors into a PID namespace: all processes that they start end with their fork
            server, also if that is killed. The actors' `os.getpid()` then differs from the pid outside.
        stop_grace: Seconds that calls under way get when their actor is stopped.
        cancel_grace: Seconds that cancelled calls get for their cleanup. A running `def` method gets none: a thread
            cannot be interrupted.
        max_pending: Calls to one process without an answer, sent or not; one more raises `Overloaded`. The
            runtime's own calls (`rt.info`, `rt.stop`) do not count and are never refused.
        patience: How long to wait for a process that does not answer: by default it is reported after 5 s, and killed
            after 30 s if it is stopped. A class line and `rt.on(patience=...)` override this.
        unhandled: "raise": log errors that no code has seen, and raise them when the block ends. "log": only log them,
            for servers that run for months.
        env: Clock, randomness and ids, for simulations.

    Raises:
        Unreachable: The transport does not work on this machine.
        SpawnFailed: The isolation is not possible on this machine.
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
        _check_options(max_pending, stop_grace, cancel_grace, unhandled)
        self._raises_unhandled = unhandled == "raise"
        # Frames of the errors that the end of the block raises.
        self._frames: list[tuple[BaseException, Any]] = []
        asked = transport or os.environ.get("AIODAFT_TRANSPORT")
        env = env or Env()
        machine = env.gpus()
        names = gpu_names(machine, os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
        claims = GpuClaims([] if share_gpus else [id_named(name, machine) for name in names])
        amounts: Resources[ActorId] = Resources(
            cpus=len(os.sched_getaffinity(0)) if cpus is None else cpus,
            gpus=len(names) if gpus is None else gpus,
            custom=resources,
            claims=claims,
        )
        peer, chosen = env.new_peer_id("controller"), check_name(asked or default_name())
        options = ControllerOptions(
            process=ProcessOptions(peer, env.hostname(), peer, chosen, not asked, cancel_grace, max_pending),
            stop_grace=stop_grace,
            isolation=prefix_of(isolation),
            patience=patience or Patience(),
            preload=preload,
            fork=sys.platform == "linux" if fork is None else fork,
            uvloop=has_uvloop() if uvloop is None else uvloop,
            gpu_names=names,
            env=env,
        )
        super().__init__(Controller(options, amounts, claims))

    # The block.

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._controller.open(self)
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(error_type, error, traceback)
        finally:
            with shield_from_anyio():
                await self._controller.aclose()

    async def aclose(self) -> None:
        """Close a runtime that was opened without a block. Idempotent.

        Raises:
            BaseExceptionGroup: Errors that no code has seen, unless they are only logged.
        """
        if not self._controller.is_closed:
            await self.__aexit__(None, None, None)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """Tell the scope of an actor that it died while no call to it was under way."""
        scope = self._owner_of(remote, actor)
        if scope is not None:
            scope.fail(error, "an actor died while no call was under way")

    # Errors that no code has seen.

    def fail(self, error: BaseException, what: str) -> None:
        """Log an error that no code will see, and keep it for the end of the block."""
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
        """Return a ref of a value, to pass to many actors: the runtime encodes and moves the value once.

        A helper thread copies a large value; do not write to it before `await ref.ready()`.

        Args:
            value: Any value that can be an argument of a call.
            transport: Overrides the transport of the runtime.

        Raises:
            SerializationError: Part of the value cannot travel.
            Unreachable: The transport does not work here; the message says why.
        """
        self._controller.check_running("a value cannot be put")
        return Ref(
            self._controller.objects.refs.put(value, "put", None if transport is None else check_name(transport))
        )

    async def name(self, actor: object, name: str) -> None:
        """Give an actor a name: `lookup` finds it by that name as long as it lives.

        Raises:
            NameTaken: Another actor has the name.
            ActorDied: The actor is gone.
            ValueError: The name is not valid.
        """
        check_actor_name(name)
        target, cls = self._target(actor), class_of(handle_of(actor))
        controller = self._controller
        if controller.directory.find(target) is None:
            # Raises if the actor is gone; it would keep the name forever.
            await controller.agent_of(target.remote).report(target.actor)
        await controller.coordinator.register(name, *target.identity, target.label, _class_names(cls))

    async def lookup(self, name: str, cls: type[ActorT]) -> ActorT:
        """Find the actor with a name.

        Raises:
            NameNotFound: No actor has the name.
            TypeError: The actor is of another class.
            ActorDied: The actor is gone, and is not restarted.
        """
        controller = self._controller
        found = await controller.coordinator.lookup(check_actor_name(name))
        if _class_names(cls)[0] not in found.class_names:
            raise TypeError(f"{name!r} is {found.label}, which is no {cls.__name__}")
        if found.peer == controller.process.id:
            target = await controller.directory.address(found.actor)
        else:
            target = controller.target(found.peer, found.actor, found.label, self)
        return cast("ActorT", Handle(target, cls))

    def traffic(self) -> Traffic:
        """The traffic of this process with actors since the runtime was opened.

        Payloads that go from actor to actor are not counted.
        """
        return self._controller.connections.traffic()

    async def stack(self, *, patience: float = 1.0) -> RuntimeStack:
        """The stacks of all processes: calls, await chains, threads, and the calls that each call waits for.

        `print(await rt.stack())` shows them; so does `aiodaft stack` in another terminal.

        Args:
            patience: Seconds that a process gets to answer. If its loop or interpreter is busy, the result has the
                stacks of its threads; not if the process is stopped.

        Cancellation: nothing is lost.
        """
        self._controller.check_running("there are no stacks")
        return await self._controller.stack(patience)

    async def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """The machine's resources: total, and free."""
        return await self._controller.node.resources()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "aclose", "lookup", "name", "put", "resources", "stack", "traffic"]

    def __repr__(self) -> str:
        controller = self._controller
        state = "open" if controller.is_open else "closed" if controller.is_closed else "not open"
        name = controller.name and f"{controller.name} "
        return f"<Runtime {name}{state}, {len(self._scope_actors)} actors>"


def _check_options(max_pending: object, stop_grace: object, cancel_grace: object, unhandled: object) -> None:
    if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
        raise ValueError(f"max_pending={max_pending!r}: a positive integer is needed")
    for name, value in {"stop_grace": stop_grace, "cancel_grace": cancel_grace}.items():
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value!r}: a number that is not negative is needed")
    if unhandled not in {"raise", "log"}:
        raise ValueError(f'unhandled={unhandled!r} is neither "raise" nor "log"')


def has_uvloop() -> bool:
    """Whether uvloop is installed."""
    return importlib.util.find_spec("uvloop") is not None


def _class_names(cls: type) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
