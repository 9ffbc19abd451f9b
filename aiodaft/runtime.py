"""The runtime: the outermost scope, which owns every process, connection and value.

A script uses `async with aiodaft.Runtime() as rt`, a notebook `rt = await aiodaft.start()`; a web server opens it in
its lifespan. The node agent and the coordinator live in this process: no other service is needed, and none listens.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from dataclasses import astuple
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, TypeVar, cast, get_origin, overload

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.coordination.records import check_name as check_actor_name
from aiodaft._protocol.coordination.records import check_prefix
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.worker import Patience
from aiodaft._protocol.numbers import count, is_count, is_number
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.agent import acting
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.controller import Controller, ControllerOptions
from aiodaft._runtime.diagnostics.tracing import packed_setup
from aiodaft._runtime.node.membership import watch_names
from aiodaft._runtime.node.shipped_code import ShippedCode
from aiodaft._runtime.node.worker import Machine, NodeOptions
from aiodaft._runtime.owning import Owner, ScopeErrors, WorkerOwner
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.placing import check_labels
from aiodaft._runtime.platform.capabilities import has_fork_server
from aiodaft._runtime.platform.tasks import log_error, logger, shield_from_anyio
from aiodaft._runtime.process import MSGPACK, Env, Process, ProcessOptions, current_process
from aiodaft._runtime.scope_actors import ScopeActors
from aiodaft._runtime.serialization.errors import add_note, give_frames, take_frames
from aiodaft._runtime.serialization.pickling import FrameData
from aiodaft.actor import Actor, class_of, handle_of
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.logs import Logs
from aiodaft.overview import NodeInfo, Overview, look_at_nodes
from aiodaft.ref import Ref
from aiodaft.scope import Scope
from aiodaft.service import Service
from aiodaft.stack import RuntimeStack
from aiodaft.survey import answers, look_over
from aiodaft.tracing import Trace
from aiodaft_transport import check_name, default_name

if TYPE_CHECKING:
    from aiodaft._runtime.connections.far import Network


__all__ = ["Runtime", "current_runtime", "has_uvloop"]

T = TypeVar("T")
ActorT = TypeVar("ActorT", bound=Actor)
_INSTEAD: Final = {
    "actors": "`(await rt.overview()).actors`",
    "close": "`await rt.aclose()`, or `async with`",
    "get": "`await ref`",
    "map": "`pool = await rt.pool(n)` and `async for result in pool.map(fn, items)`",
    "shutdown": "`await rt.aclose()`, or `async with`",
    "submit": "`pool = await rt.pool(n)` and `pool.submit(fn, x)`, or `actor.method(x)`",
    "wait": "`await asyncio.wait(refs)`",
}


class Runtime(Scope):
    """Owns actors, their processes, and everything between them.

    Unlike the scopes inside it (`rt.scope()`), it does not cancel its block for an error that no code will see: the
    error of a call with a dropped ref, or of an actor that died while no call was under way. It logs the error with its
    traceback, and the block goes on. When the block ends, it raises these errors and the unseen errors of refs in an
    ExceptionGroup: the first 100, and the number of the others. A block that ends by a cancellation or SystemExit
    raises only that.

    Args:
        address: The address of a node of a cluster, such as "tcp://10.0.0.1:7777". Default: $AIODAFT_ADDRESS, or this
            machine alone.
        key_file: The key of the cluster. Default: $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key.
        cpus: CPUs to offer. Default: the process's affinity.
        gpus: GPUs to offer. Default: all GPUs of the machine. Give a number to develop without GPUs.
        share_gpus: Whether other runtimes may give the same GPUs to their actors at the same time. By default a runtime
            claims each GPU of the machine while an actor has it: another runtime gives its actors another GPU, or
            raises `InsufficientResources`, which names the process. An actor that opens a runtime on its own GPUs
            needs True there.
        resources: Other resources, such as `{"disk": 2}`; actors reserve them by `rt.on(resources=...)`.
        labels: Labels of this machine, such as `{"zone": "a"}`, for `rt.on(labels=...)`.
        transport: The transport of payloads: "shm", "ucx" or "tcp". Default: $AIODAFT_TRANSPORT, or the best of the
            machine; then CUDA tensors go from GPU to GPU.
        preload: Modules that workers share instead of each importing them. Default: numpy and torch, if they are
            loaded here.
        fork: False starts every worker by exec, for code that fails in a forked process. Default: True where the system
            has a fork server, as Linux does.
        uvloop: Whether workers run on uvloop. Default: if it is installed.
        stop_grace: Seconds that calls under way get when their actor is stopped.
        cancel_grace: Seconds that cancelled calls get for their cleanup. A running `def` method gets none: a thread
            cannot be interrupted.
        max_pending: Calls to one process without an answer, sent or not; one more raises `Overloaded`. The
            runtime's own calls (`rt.info`, `rt.stop`) do not count and are never refused.
        patience: The time to wait for a process that does not answer: by default it is reported after 5 s, and killed
            after 30 s if it is stopped. A class line and `rt.on(patience=...)` override this.
        unhandled: "raise": log errors that no code has seen, and raise them when the block ends. "log": only log them,
            for servers that run for months.
        codec: "msgpack": no process pickles or unpickles, and none runs code that is sent. Arguments and results are
            then plain data, arrays, tensors, refs, handles, and dataclasses, named tuples, enums and exceptions of
            classes that every process can import. A process has runtimes of one codec at a time.
        logs: Options for the output and the log records of actors, or just a folder for a file per actor.
        telemetry: Makes calls spans of OpenTelemetry: a function that sets up a tracer provider, or its place, such as
            "package.module:function". It is called here and in each process of actors, unless that has one.
        seed: Makes the random numbers of actors repeatable: those of Python, numpy and torch, if these are loaded when
            an actor is made, then follow from it, the actor's name and its epoch. Actors draw different ones, also
            without it.
        env: Clock, randomness and ids, for simulations.

    Raises:
        OSError: When it is opened: the folder for logs cannot be made.
        Unreachable: The transport does not work on this machine.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        key_file: str | os.PathLike[str] | None = None,
        cpus: float | None = None,
        gpus: int | None = None,
        share_gpus: bool = False,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        transport: str | None = None,
        preload: tuple[str, ...] | None = None,
        fork: bool | None = None,
        uvloop: bool | None = None,
        stop_grace: float = 5.0,
        cancel_grace: float = 2.0,
        max_pending: int = 1_000_000,
        patience: Patience | None = None,
        unhandled: Literal["raise", "log"] = "raise",
        codec: Literal["pickle", "msgpack"] = "pickle",
        logs: Logs | str | os.PathLike[str] | None = None,
        telemetry: Callable[[], object] | str | None = None,
        seed: int | None = None,
        env: Env | None = None,
    ) -> None:
        _check_options(max_pending, stop_grace, cancel_grace, unhandled, seed)
        self._address_given = bool(address)
        address = address or _address_of_environment()
        asked = transport or os.environ.get("AIODAFT_TRANSPORT")
        env = env or Env()
        machine = Machine(env, cpus, gpus, resources, share_gpus=share_gpus)
        peer, chosen = env.new_peer_id("controller"), check_name(asked or default_name())
        with _telling_whose_address(self._address_given):
            cluster = None if not address else _cluster_at(address, key_file, env)
        options = ControllerOptions(
            process=ProcessOptions(
                peer,
                env.hostname(),
                peer,
                peer,
                peer,
                peer,
                chosen,
                not asked,
                cancel_grace,
                max_pending,
                codec,
                stop_grace,
                astuple(patience or Patience()),
                telemetry=packed_setup(telemetry, codec),
                seed=seed,
            ),
            node=NodeOptions(
                has_fork_server() if fork is None else fork,
                preload,
                has_uvloop() if uvloop is None else uvloop,
            ),
            labels=dict(check_labels(labels or {})),
            env=env,
            logs=logs if isinstance(logs, Logs) else Logs(logs),
            cluster=cluster,
        )
        controller = Controller(options, machine)
        controller.answers = answers(controller)
        super().__init__(ScopeActors(controller, _RuntimeErrors(controller, raises=unhandled == "raise")))

    @property
    def _opened(self) -> Controller:
        return cast("Controller", self._controller)

    async def __aenter__(self) -> Self:
        check_asyncio_runs()
        await super().__aenter__()
        controller = self._opened
        with _telling_whose_address(self._address_given):
            await controller.find_cluster()
        try:
            controller.open(self._actors)
            controller.process.provide(Runtime, self)
            await controller.join_cluster()
        except BaseException:
            await controller.aclose()
            raise
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(error_type, error, traceback)
        finally:
            with shield_from_anyio():
                await self._opened.aclose()

    async def aclose(self) -> None:
        """Close a runtime that was opened without a block. Idempotent.

        Raises:
            BaseExceptionGroup: Errors that no code has seen, unless they are only logged.
        """
        if not self._controller.is_closed:
            await self.__aexit__(None, None, None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            instead = f": use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def put(self, value: T, *, transport: str | None = None) -> Ref[T]:
        """Return a ref of a value, to pass to many actors: the runtime encodes and moves the value once.

        It is encoded and copied now: later changes of the value do not reach the actors.

        Args:
            value: Any value that can be an argument of a call.
            transport: Overrides the transport of the runtime.

        Raises:
            SerializationError: Part of the value cannot travel.
            ResourceExhausted: There is no memory or descriptor for it.
            Unreachable: The transport does not work here; the message says why.
        """
        self._controller.check_running("a value cannot be put")
        return Ref(
            self._controller.objects.refs.put(value, "put", None if transport is None else check_name(transport))
        )

    async def ship(self, path: str | os.PathLike[str]) -> None:
        """Send code with the actors that are spawned from now on: their processes import it before anything else.

        Each machine gets it once, with the first actor there, and removes it when this runtime has ended. Once a path
        is shipped again, new actors get its content of that time.

        Args:
            path: A folder of modules and packages, one package (a folder with `__init__.py`), or one module (`*.py`).
                Files and folders with a leading dot and compiled files are left out. At most 10,000 files of 64 MiB.

        Raises:
            OSError: It does not exist, or cannot be read.
            RuntimeError: This is the runtime of an actor: actors that it spawns import the code that its program has
                shipped.
            ValueError: It is too large, or a link leads out of it; or the codec of the runtime is "msgpack", with which
                no code is sent.
        """
        self._controller.check_running("code cannot be shipped")
        process = self._controller.process
        if process.options.codec == MSGPACK:
            raise ValueError('Runtime(codec="msgpack") sends no code: install it on every machine')
        shipped = process.find(ShippedCode)
        if shipped is None:
            raise RuntimeError("an actor ships no code: actors that it spawns import the code of its program")
        await shipped.offer(os.fspath(path))

    async def name(self, actor: Actor | Service[Any], name: str) -> None:
        """Give an actor a name: `lookup` finds it by that name as long as it lives.

        Raises:
            NameTaken: Another actor has the name.
            ActorDied: The actor is gone.
            ValueError: The name is not valid.
        """
        check_actor_name(name)
        target, cls = self._actors.target(actor), class_of(handle_of(actor))
        controller = self._controller
        await controller.ready()
        if controller.directory.find(target) is None:
            # Raises if the actor is gone; it would keep the name forever.
            await controller.agent_of(target.remote).report(target.actor)
        await controller.register(target, cls, name)

    @overload
    async def lookup(self, name: str, cls: type[ActorT]) -> ActorT: ...  # type: ignore[overload-overlap]  # the first that fits counts
    @overload
    async def lookup(self, name: str, cls: type[T]) -> Service[T]: ...
    async def lookup(self, name: str, cls: type[Any]) -> Any:
        """Find the actor with a name, or the `Service`; while it is restarted, this waits.

        Raises:
            NameNotFound: No actor has the name.
            TypeError: The actor is of another class.
            ActorDied: The actor is gone, and is not restarted.
        """
        named = await self._controller.coordinator.lookup(check_actor_name(name))
        cls = get_origin(cls) or cls
        handle = await self._controller.found(named, cls, self._actors.errors)
        return handle if issubclass(cls, Actor) else Service(handle, cls)

    async def names(self, prefix: str = "") -> tuple[str, ...]:
        """The names of actors that begin like this, in alphabetical order.

        Raises:
            ValueError: No name can begin like this.
        """
        return tuple(named.name for named in await self._controller.coordinator.names(check_prefix(prefix)))

    def watch(self, prefix: str = "") -> AsyncGenerator[tuple[str, ...], None]:
        """The same names at once, and again whenever one comes, goes, or is that of another actor.

        While the coordinator does not answer, nothing comes. Cancellation: nothing is lost.
        """
        return watch_names(self._controller.contact, check_prefix(prefix))

    def traffic(self) -> Traffic:
        """The traffic of this process with actors since the runtime was opened; also when it is closed.

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

    async def overview(self, *, patience: float = 1.0) -> Overview:
        """One look at the whole runtime: nodes, processes, actors, traffic, stored values, failures.

        Every node and every process is asked once, at the same time. Calls that succeed do nothing for it.

        Args:
            patience: Seconds that they get to answer. A process that does not is shown as its node knows it
                (`ProcessInfo.answered` is False).

        Cancellation: nothing is lost.
        """
        self._controller.check_running("there is no overview")
        return await look_over(self._controller, patience)

    def trace(self, path: str | os.PathLike[str], *, limit: int = 100_000, patience: float = 5.0) -> Trace:
        """Record all processes in a block, `async with rt.trace("run.json"):`, to a file for ui.perfetto.dev.

        The file is in the Trace Event Format of Chrome: calls, from submission to end, the steps of compiled graphs,
        collectives, and large values on their way. It has the processes of this program and of the actors that it owns.

        Args:
            path: The file. It is valid JSON at any time, and has the events when the block has ended.
            limit: The events that a process keeps, about 200 bytes each. Later ones are counted, and a warning tells.
            patience: Seconds that a process gets to begin, and to answer at the end. One that does not is left out,
                and a warning tells which.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: A trace is recorded already.
            ValueError: A limit is not positive.

        Cancellation: the file has the events that were recorded until then.
        """
        return Trace(self._controller, path, limit, patience)

    async def nodes(self, *, patience: float = 1.0) -> tuple[NodeInfo, ...]:
        """The nodes of the cluster by name, with the free resources of each; without a cluster, this machine.

        Args:
            patience: Seconds that a node gets to answer; one that does not is "silent".

        Raises:
            DaftError: This is the runtime of an actor whose node does not answer.

        Cancellation: nothing is lost.
        """
        self._controller.check_running("nodes cannot be asked")
        return await look_at_nodes(self._controller, patience)

    def __repr__(self) -> str:
        controller = self._controller
        state = "open" if controller.is_open else "closed" if controller.is_closed else "not open"
        name = controller.name and f"{controller.name} "
        return f"<Runtime {name}{state}, {count(len(self._actors), 'actor')}>"


class _RuntimeErrors(ScopeErrors):
    """Errors of the actors of a runtime end no body: they are logged, and raised by the end of the block."""

    def __init__(self, owner: Owner, *, raises: bool) -> None:
        super().__init__(owner)
        self._raises = raises
        # Frames of the errors that the end of the block raises.
        self._frames: list[tuple[BaseException, list[FrameData]]] = []

    def fail(self, error: BaseException, what: str) -> None:
        """Log an error that no code will see, and keep it for the end of the block."""
        if not self.comes_of_closing(error):
            # A notebook shows what is written below the cell of the context, and this context is that of the cell that
            # made the connection. In an empty one, it is shown below the cell that runs.
            Context().run(log_error, what, error)
            if self._raises and self.kept.add(error):
                self._frames += take_frames(error)

    def after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        if self._raises and (error is None or isinstance(error, Exception)):
            give_frames(self._frames)
            return super().after(error)
        for what, one in self.unseen():
            log_error(what, one)
        return None


def _cluster_at(address: str, key_file: str | os.PathLike[str] | None, env: Env) -> tuple[str, Network]:
    """The address at which a node listens, and the way to it."""
    if env.network is not None:
        return address, env.network
    from aiodaft._runtime.connections.dialing import TcpNetwork  # noqa: PLC0415 - as above
    from aiodaft._runtime.connections.identity import load_identity  # noqa: PLC0415 - TLS is slow to load

    return str(parse_address(address)), TcpNetwork(load_identity(key_file))


def _address_of_environment() -> str | None:
    """The variable, if it is set; else warns if srun runs the program on several machines, alone on each.

    Raises:
        ValueError: A variable has a typo.
    """
    for name in os.environ:
        if name.upper().startswith(("AIODA", "DAFT")) and any(part in name.upper() for part in ("ADD", "ADR", "DDR")):
            if name == "AIODAFT_ADDRESS":
                return os.environ[name] or None
            raise ValueError(f"${name} is no variable of aiodaft: set $AIODAFT_ADDRESS instead, or unset it")
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "1")
    if nodes != "1" and os.environ.get("SLURM_PROCID") == "0":
        logger.warning(
            "srun runs this program on %s machines, and each has a runtime of its own: use `srun --ntasks-per-node=1 "
            "aiodaft run SCRIPT` for a cluster of them",
            nodes,
        )
    return None


@contextmanager
def _telling_whose_address(given: bool) -> Generator[None]:
    """Errors of the way to a cluster say so if no code has asked for it."""
    try:
        yield
    except (DaftError, ValueError) as error:
        if not given:
            add_note(error, "the address is that of $AIODAFT_ADDRESS; without it, the runtime has this machine alone")
        raise


def _check_options(
    max_pending: object, stop_grace: object, cancel_grace: object, unhandled: object, seed: object
) -> None:
    if not is_count(max_pending):
        raise ValueError(f"max_pending={max_pending!r}: a positive integer is needed")
    for name, value in {"stop_grace": stop_grace, "cancel_grace": cancel_grace}.items():
        if not is_number(value):
            raise ValueError(f"{name}={value!r}: a number that is not negative is needed")
    if unhandled not in {"raise", "log"}:
        raise ValueError(f'unhandled={unhandled!r} is neither "raise" nor "log"')
    if seed is not None and not is_count(seed, 0):
        raise ValueError(f"seed={seed!r}: an integer that is not negative is needed")


def check_asyncio_runs() -> None:
    """Raise RuntimeError where no event loop of asyncio runs."""
    if asyncio._get_running_loop() is None:
        raise RuntimeError(
            "no event loop of asyncio runs here: use `aiodaft.run(main())` or `asyncio.run(main())`, not trio"
        )


def has_uvloop() -> bool:
    """Whether uvloop is installed."""
    return importlib.util.find_spec("uvloop") is not None


def current_runtime() -> Runtime:
    """The runtime of the code that calls this.

    In a program, it is the one that the program has opened. In an `async def` method of an actor, it is the runtime of
    the actor: actors that are spawned there end with it, and with its process. Errors there that no code sees go to the
    scope that owns the actor. It is open as long as the actor lives: use it without `async with`.

    Raises:
        RuntimeClosed: No runtime is open, or several are and none surrounds the caller.
        RuntimeError: This is a thread, or no method of an actor runs here.
    """
    process = current_process()
    if not process.is_here:
        raise RuntimeError(
            "current_runtime() is for the event loop, and this is a thread, as in a `def` method or a constructor: use "
            "it in an `async def` method, or in `async def __aenter__(self)`, which runs before the first call"
        )
    program = process.find(Runtime)
    if program is not None:
        return program
    hosted = acting()
    if hosted is None:
        raise RuntimeError("current_runtime() is for methods of actors: none runs here")
    runtimes = process.find(ActorRuntimes)
    if runtimes is None:
        runtimes = ActorRuntimes(process, hosted.id)
        process.provide(ActorRuntimes, runtimes)
    return runtimes.of(hosted)


class ActorRuntime(Runtime):
    """The runtime of an actor."""

    def __init__(self, owner: Owner) -> None:
        Scope.__init__(self, ScopeActors(owner, _ActorErrors(owner)))

    async def __aenter__(self) -> NoReturn:
        raise RuntimeError("the runtime of an actor is open as long as the actor lives: use it without `async with`")

    async def aclose(self) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("the runtime of an actor ends with the actor")


class _ActorErrors(ScopeErrors):
    """Errors of the actors that an actor has spawned are told to the owner of that actor."""

    def fail(self, error: BaseException, what: str) -> None:
        if not self.comes_of_closing(error):
            self._owner.objects.on_unheld(error, what)


class ActorRuntimes:
    """The runtimes of the actors of one process."""

    def __init__(self, process: Process, actor: ActorId) -> None:
        self._owner = WorkerOwner(process.part(Peer), self, actor)
        self._runtimes: dict[HostedActor, ActorRuntime] = {}

    def of(self, hosted: HostedActor) -> ActorRuntime:
        """The runtime of an actor, open or not."""
        runtime = self._runtimes.get(hosted)
        if runtime is None:
            runtime = self._runtimes[hosted] = ActorRuntime(self._owner)
            hosted.stop_spawned = partial(_leave, runtime._actors)
        return runtime

    def all_actors(self) -> Iterator[Target]:
        """The actors that the actors of this process have spawned."""
        return chain.from_iterable(runtime._actors.all_actors() for runtime in self._runtimes.values())

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code will see."""
        self._owner.objects.on_unheld(error, what)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """An actor died while no call to it was under way."""
        for runtime in self._runtimes.values():
            runtime._actors.actor_died(remote, actor, error)

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None:
        """A node is gone; see `ScopeActors.node_gone`."""
        for runtime in self._runtimes.values():
            runtime._actors.node_gone(name, error, idle)


async def _leave(actors: ScopeActors) -> None:
    interrupted = await actors.close(graceful=True)
    for what, one in actors.errors.unseen():
        actors.owner.objects.on_unheld(one, what)
    if interrupted is not None:
        raise interrupted
