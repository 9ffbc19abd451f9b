"""The entry point of a worker: runs a loop with a peer and a connection to the controller, and ends with either."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, PeerId
from aiodaft._protocol.node.worker import Answer, Code
from aiodaft._runtime.actors.host import Enlisted, Host
from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.agent import acting
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.dialing import TcpNetwork
from aiodaft._runtime.connections.far import FarConnections, Network
from aiodaft._runtime.connections.identity import Identity
from aiodaft._runtime.diagnostics.attach import is_debugged
from aiodaft._runtime.diagnostics.await_chains import offer_dump
from aiodaft._runtime.diagnostics.process_view import on_loop
from aiodaft._runtime.diagnostics.tracing import begin_telemetry, end_telemetry, set_up_telemetry
from aiodaft._runtime.logs.options import trace_ids
from aiodaft._runtime.logs.worker_output import send_records
from aiodaft._runtime.node.worker import BY_KERNEL, QUESTION, WorkerSettings
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.linux import FOR_PROGRAM, die_with_parent, finish, kill_group, leave_signals, when_forked
from aiodaft._runtime.platform.tasks import log_error
from aiodaft._runtime.process import Env, opened
from aiodaft._runtime.serialization.errors import encode_error
from aiodaft._runtime.serialization.scripts import await_main, script_of
from aiodaft.exceptions import DaftError, ProtocolError, RuntimeClosed
from aiodaft_transport import Key
from aiodaft_transport.handshake import KEY_SIZE


def debug_at(terminal: str) -> None:
    loaded = sys.modules.get("pdb")
    if loaded is None:
        # It takes 10 ms to load, and few programs need it.
        sys.meta_path.insert(0, _PdbFinder(terminal))
    else:
        _replace_pdb(loaded, terminal)


class _PdbFinder:
    def __init__(self, terminal: str) -> None:
        self._terminal = terminal

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "pdb":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load: Callable[[ModuleType], object] = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace_pdb(module, self._terminal)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # as good as the method
        return spec


def _replace_pdb(loaded: Any, terminal: str) -> None:
    from aiodaft._runtime.diagnostics.actor_pdb import ActorPdb  # noqa: PLC0415 - it needs pdb

    ActorPdb.terminal = terminal
    loaded.Pdb = ActorPdb


# The `__main__` of a process of actors: the parts of the script that have come.
#
# pickle looks up its names there, also for processes that multiprocessing starts by spawn or forkserver. Those would
# run the script again, which may not be on their machine, or be a notebook, or start a runtime. They get these parts.


def take_main() -> None:
    await_main(ModuleSpec(_Name("__main__"), None))


class _Name(str):
    """The name of the module in this process. multiprocessing tells it a new process, which makes the module of it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_of, (list(filter(None, map(_packed, list(vars(sys.modules["__main__"]))))),)


def _packed(name: str) -> bytes | None:
    """A name of the script and its value here; None if it cannot travel."""
    from aiodaft._runtime.serialization.code_pickler import pickle_code  # noqa: PLC0415 - slow to import

    script = script_of(vars(sys.modules["__main__"]))
    if script is None or name.startswith("__"):
        return None
    try:
        return pickle_code((script, name, script.namespace[name]))
    except Exception:  # noqa: BLE001 - user code runs while pickling, and may raise anything
        return None


def _main_of(names: list[bytes]) -> str:
    take_main()
    for packed in names:
        namespace, name, value = pickle.loads(packed)
        namespace.setdefault(name, value)
    return "__main__"


def part_from_parent() -> None:
    """In a forked process: leave the states that its parent and its siblings have. Python leaves its own."""
    numpy, torch = _loaded()
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.default_generator.seed()


def repeat(seed: int, label: str, epoch: int) -> int:
    """Seed all three for an incarnation of an actor. Returns the seed for the actors that it spawns."""
    own = random.Random(f"{seed} {label} {epoch}").getrandbits(63)
    random.seed(own)
    numpy, torch = _loaded()
    if numpy is not None:
        numpy.seed(own % (1 << 32))
    if torch is not None:
        torch.manual_seed(own)
    return own


def _loaded() -> tuple[Any, Any]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return getattr(numpy, "random", None), torch if hasattr(torch, "default_generator") else None


_EXIT_GRACE = 1.0
# A package with so many modules is slow to import.
_MANY_MODULES = 100


class Heartbeat:
    """Answers the node, which asks once a period, in a thread: also while the loop, a method or an import is busy.

    It is silent only if the process is stopped, or C code holds the GIL; `_protocol/node/worker.py` decides what
    follows from that.
    """

    def __init__(self, connection: socket.socket, host: Host) -> None:
        self._connection = connection
        self._process = host.process
        self._host = host
        self._loop_thread = threading.get_ident()
        self._lag = 0.0
        self._asked: float | None = None
        # The longest running call, as its caller and number, and when it was first seen.
        self._oldest: tuple[PeerId, CallId] | None = None
        self._name = ""
        self._since = 0.0

    def start(self) -> None:
        threading.Thread(target=self._answer_all, name="aiodaft heartbeat", daemon=True).start()

    def _answer_all(self) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(len(QUESTION)):
                self._connection.send(self._answer(self._process.env.monotonic()))

    def _answer(self, now: float) -> bytes:
        culprit = line = ""
        if self._asked is None:
            self._asked = now
            self._process.call_soon(self._turned)
        else:
            self._lag = now - self._asked
            culprit, line = ("", "") if is_debugged() else self._find_culprit()
        # Raised if the loop changes its calls at this moment, and so is not blocked.
        with contextlib.suppress(RuntimeError):
            call = next((call for call in self._host.calls() if _runs(call)), None)
            key = None if call is None else (call.caller, call.number)
            if key != self._oldest:
                self._oldest, self._name, self._since = key, "" if call is None else call.label, now
        name = f"{self._name} (in the debugger)" if is_debugged() else self._name
        return Answer(self._lag, now - self._since, name, culprit, line).pack()

    def _find_culprit(self) -> tuple[str, str]:
        """The call that blocks the loop and the line where it does so, if that is user code."""
        call, line = on_loop(self._loop_thread)
        if call is None:
            return "", line
        if call.hosted.id < FIRST_USER_ACTOR:
            # The agent makes an actor: imports may take long.
            return "", ""
        return f"{call.label} of {call.hosted.name}", line

    def _turned(self) -> None:
        if self._asked is not None:
            self._lag = self._process.env.monotonic() - self._asked
            self._asked = None


def _runs(call: InboundCall) -> bool:
    return call.begun and call.hosted.id >= FIRST_USER_ACTOR


class WorkerMain:
    """A worker process.

    Args:
        before: The number of modules that it got from the fork server; 0 if it imports all by itself.
    """

    def __init__(
        self, settings: WorkerSettings, sock: socket.socket, heartbeat: socket.socket, env: Env, before: int = 0
    ) -> None:
        self._began = env.monotonic()
        self._before = before
        self._settings = settings
        self._connection = sock
        self._heartbeat = heartbeat
        self._env = env
        self._status = 0
        self._over = asyncio.Event()

    async def run(self) -> int:
        when_forked(leave_signals)
        settings = self._settings
        if len(settings.secret) == KEY_SIZE:
            peer = Peer(settings.options, Key(settings.secret), self._env)
        else:
            network: Network = self._env.network or TcpNetwork(Identity(settings.secret))
            peer = Peer(settings.options, network.key, self._env)
            peer.connections.far = FarConnections(peer.process, network, peer.connections)
        peer.process.code = Code(settings.options.agent, tuple(settings.digests))
        peer.connections.explain = self._explain
        peer.host.on_exit = self._exit_requested
        peer.host.on_first = self._seed
        peer.host.imported = self._imported
        peer.objects.on_unheld = self._report_unheld
        peer.caller.current_maker = current_call.get
        self._peer = peer
        if settings.options.telemetry:
            _begin_telemetry(peer)
        opened(peer.process, peer.stay_behind)
        # Loaded now, because later there may be no descriptors left to load it with.
        peer.store.transport_named(settings.options.transport)
        self._start_heartbeat(peer)
        peer.connections.attach(settings.options.agent, self._connection)
        await self._over.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE):
                sending = (asyncio.to_thread(end_telemetry),) if settings.options.telemetry else ()
                await asyncio.gather(peer.aclose("the worker ended"), *sending)
        return self._status

    def _start_heartbeat(self, peer: Peer) -> None:
        Heartbeat(self._heartbeat, peer.host).start()

    def _seed(self, label: str, epoch: int) -> None:
        process = self._peer.process
        if process.options.seed is not None:
            own = repeat(process.options.seed, label, epoch)
            process.options = process.options._replace(seed=own)

    def _imported(self) -> tuple[float, tuple[str, ...]] | None:
        seconds = self._env.monotonic() - self._began
        return (seconds, large_packages(list(sys.modules)[self._before :])) if self._before else None

    def _end(self, status: int) -> None:
        self._status = status
        self._over.set()

    async def _explain(self, connection: Connection, reason: Exception) -> DaftError:
        if connection.remote == self._settings.options.agent:
            # The exit code is 0 only if the node closed the connection.
            self._end(0 if connection.dismissed else 1)
            if isinstance(reason, ProtocolError):
                log_error("the connection to the node agent broke", reason)
            return RuntimeClosed(f"the node agent is gone: {reason}")
        if isinstance(reason, ProtocolError):
            return reason
        return await self._peer.node.exit_report(connection.remote, self._peer.graphs.in_flight(connection))

    def _exit_requested(self, error: BaseException) -> None:
        # At once and without an answer: callers get the exit report.
        _exit_as(error)

    def _report_unheld(self, error: BaseException, what: str) -> None:
        if self._peer.process.closed is None:
            peer = self._peer
            names = " and ".join(actor.name for actor in peer.actors.values() if actor.id >= FIRST_USER_ACTOR)
            where = f"{names} (pid {peer.process.pid})" if names else peer.process.id
            peer.owner(self._settings.options.owner).unheld.tell(encode_error(error), f"{what} (in {where})")
        else:
            log_error(what, error)


def large_packages(modules: Sequence[str]) -> tuple[str, ...]:
    counts = Counter(name.partition(".")[0] for name in modules)
    return tuple(name for name, count in counts.items() if count >= _MANY_MODULES and name != "aiodaft")


def run_forked(parent: int, packed: bytes, connection: int, out: int, err: int, heartbeat: int) -> int:
    """In a forked child: use these descriptors, close the parent's, and serve."""
    os.setsid()
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    part_from_parent()
    # The environment may name another time zone than the fork server's.
    time.tzset()
    _set_threads()
    return _serve(packed, connection, heartbeat, before=len(sys.modules))


def _stream(fd: int, mode: str) -> TextIO:
    # Line by line, so that a line is in the log before the next call fails.
    stream = open(fd, mode, encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 - it stays open
    return cast("TextIO", stream)


def main(connection: int, settings: int, heartbeat: int, lifeline: int) -> None:
    with open(settings, "rb") as file:
        packed = file.read()
    leave: Callable[[int], object] = os._exit
    if lifeline == BY_KERNEL:
        die_with_parent(os.getppid())
    else:
        threading.Thread(target=_end_with, args=(lifeline,), name="aiodaft lifeline", daemon=True).start()
        leave = partial(_leave, lifeline)
    sys.exit(_serve(packed, connection, heartbeat, leave))


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    threading.Event().wait(_EXIT_GRACE)
    kill_group(os.getpid())


def _leave(lifeline: int, status: int) -> None:
    """End this process; if its parent is gone, which would do that, with the processes that this one has started."""
    ending = select.poll()
    ending.register(lifeline, select.POLLIN)
    # The connection to the parent may have ended before the lifeline.
    if ending.poll(_EXIT_GRACE * 1000 if status else 0):
        kill_group(os.getpid())
    os._exit(status)


def _serve(
    packed: bytes, connection: int, heartbeat: int, leave: Callable[[int], object] = os._exit, before: int = 0
) -> int:
    # These are for the controller, which ends its actors: a terminal, Slurm and systemd send them to every process. Not
    # SIG_IGN but for SIGINT, since the programs that an actor starts would inherit it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, *FOR_PROGRAM):
        signal.signal(number, lambda *_: None)
    settings = WorkerSettings.unpacked(packed)
    send_records(settings.levels, _who)
    debug_at(settings.terminal)
    sys.argv[:] = settings.argv
    take_main()
    sockets = socket.socket(fileno=connection), socket.socket(fileno=heartbeat)

    async def serve() -> int:
        offer_dump()
        return await WorkerMain(settings, *sockets, Env(), before).run()

    factory = None
    if settings.uvloop:
        import uvloop  # noqa: PLC0415 - optional

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            status = runner.run(serve())
        except (SystemExit, KeyboardInterrupt) as error:
            # Of a task or callback of an actor. The runner would cancel the calls first.
            _exit_as(error)
        # The process does not wait for `def` methods and user threads.
        threading.Thread(target=_leave_later, args=(leave, status), name="aiodaft exit", daemon=True).start()
        finish()
        leave(status)
    return status


def _leave_later(leave: Callable[[int], object], status: int) -> None:
    time.sleep(_EXIT_GRACE)  # noqa: TID251 - a thread of its own
    leave(status)


def _exit_as(error: BaseException) -> NoReturn:
    code = error.code if isinstance(error, SystemExit) else 130
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _begin_telemetry(peer: Peer) -> None:
    try:
        set_up_telemetry(peer.process.options.telemetry)
        begin_telemetry(peer.caller, peer.host, peer.inbound, peer.graphs)
    except Exception as error:  # noqa: BLE001 - actors work without it
        log_error("this process of actors has no telemetry: it could not be set up", error)


def _who() -> dict[str, Any]:
    hosted, call = acting(), current_call.get()
    if hosted is None:
        return {}
    who: dict[str, Any] = {"actor": hosted.name, **trace_ids()}
    if call is not None and call.hosted is hosted:
        who["method"] = call.label
    standing = hosted._process.part(Enlisted).find(hosted.id)
    if standing is not None:
        who["rank"] = standing.rank
    return who


def _set_threads() -> None:
    """Set torch's threads: a torch that the fork server has loaded has not read this process's environment."""
    torch: Any = sys.modules.get("torch")
    # OpenMP allows a list, with a number per level of nesting.
    number = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if hasattr(torch, "set_num_threads") and number.isdecimal() and int(number):
        torch.set_num_threads(int(number))
