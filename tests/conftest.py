"""The ground of every test: both event loops, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import pytest_asyncio
import uvloop
from actors import Echo
from clusters import NODES
from host_devices import HostDriver, use_host_devices
from inside import actors_of, open_runtimes
from leaks import Snapshot
from terminals import Terminal
from warm_servers import WarmServers, warm_servers

import aiodaft
from aiodaft._runtime.diagnostics.await_chains import frames_of
from aiodaft.actor import Handle

# Workers load the packages hundreds of times: with this setting they would compile them each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads of torch spin while they wait for each other: for actors that add small tensors, that is most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# libuv opens a pipe for signals with its first loop, and keeps it for the life of the process.
uvloop.new_event_loop().close()

# Seconds that a test gets to end by itself after its time limit, or its failure.
_LAST_GRACE = 60.0
# Tests of loops themselves: in the default suite, they run on both.
_LOOP_IS_THE_SUBJECT = {
    "test_connection", "test_eager_start", "test_eager_start_cancelled", "test_first_steps", "test_listener",
    "test_nested_loops", "test_secure_socket", "test_wakeup",
}  # fmt: skip
# Tests of code on sockets, timers, threads, signals, tasks and their frames: on asyncio's loop, CI runs them.
_LOOP_MATTERS = {
    "test_boundaries", "test_calls", "test_cancellation", "test_cancellation_matrix", "test_channels", "test_deadlines",
    "test_deadlocks", "test_death", "test_embedding", "test_exhaustion", "test_forks", "test_graphs", "test_order",
    "test_overload", "test_processes", "test_refs", "test_stack", "test_streams", "test_surroundings", "test_threads",
    "test_unhandled",
}  # fmt: skip
# The texts of a test whose time is over: raised in it, or in a callback.
_OVER = ("from pytest-timeout", "Event loop stopped before Future completed")
_STDERR = pytest.StashKey[int]()
_FAILED = pytest.StashKey[bool]()
_OF_TORCH = {"torch", "transformers"}
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def _stoppable(new_event_loop: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    loop = new_event_loop()
    loop.set_exception_handler(_stop_when_time_is_over)
    _loops.add(loop)
    return loop


# The same for all tests: those of a module that share a loop are known by it.
_LOOPS = {
    "asyncio": partial(_stoppable, asyncio.new_event_loop),
    "uvloop": partial(_stoppable, uvloop.new_event_loop),
}


def _stop_when_time_is_over(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The exception of a test's time limit may be raised in a callback, and loops do not pass its errors on."""
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), pytest.fail.Exception):
        loop.stop()


# Without torch, which does not come for every Python as soon as that is out, tests that need it are skipped.


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call: pytest.CallInfo[Any] | None = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and _needs_torch(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "Skipped: needs torch")
    return report


def _needs_torch(error: BaseException | None) -> bool:
    """Whether an error comes of a package that is not installed: torch, or one that needs it."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return error is not None and error.name in _OF_TORCH and find_spec("torch") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and _needs_torch(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "Skipped: needs torch")
    elif call.excinfo is not None:
        item.stash[_FAILED] = True
        if any(sign in str(call.excinfo.value) for sign in _OVER):
            # The limit finds a loop that waits; here are the events that it waits for.
            report.sections.append(("where the tasks were", _where_tasks_are()))
    return report


def _where_tasks_are() -> str:
    where: list[str] = []
    for loop in _loops:
        for task in asyncio.all_tasks(loop):
            frames = ((frame, frame.f_lineno) for frame in frames_of(task.get_coro()))
            where += [f"{task}\n", *traceback.StackSummary.extract(frames).format()]
    return "".join(where)


# The time limit raises an exception, once, and not any more after a failure. A test that goes on
# nevertheless is ended, and its place is shown.


def pytest_configure(config: pytest.Config) -> None:
    # While tests run, it is captured.
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, bool | None, bool | None]:
    _end_after(settings.timeout + _LAST_GRACE, item)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    if _FAILED in item.stash:
        # That has stopped the clock.
        _end_after(_LAST_GRACE, item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    # pytest-xdist calls a run without tests a success if a worker dies while it collects them.
    if error is not None:
        node.config.pluginmanager.get_plugin("session").testsfailed += 1


def _end_after(seconds: float, item: pytest.Item) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return _LOOPS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that repeat uvloop's checks on asyncio's own loop, where the loop is not the subject."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        marker = item.get_closest_marker("asyncio")
        chosen = marker is not None and "loop_factories" in marker.kwargs
        on_asyncio = params.get("_asyncio_loop_factory") is _LOOPS["asyncio"]
        if on_asyncio and not chosen and item.path.stem not in _LOOP_IS_THE_SUBJECT:
            item.add_marker("both_loops")
            if item.path.stem not in _LOOP_MATTERS and item.path.parent.name not in {"hosts", "runtime"}:
                item.add_marker("soak")


@pytest.fixture(scope="module", autouse=True)
def what_is_loaded_is_no_garbage() -> None:
    """Each test collects garbage before it is judged: objects from before its module need not be looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[WarmServers]:
    with warm_servers() as servers, closing(NODES):
        yield servers


@pytest.fixture(scope="module", autouse=True)
def preloaded(request: pytest.FixtureRequest, fork_servers: WarmServers) -> Iterator[None]:
    """Runtimes of this process preload the modules in PRELOAD of the test module, without it none.

    By default they would import torch, which some test has loaded, for actors that do not use it: a second each time.
    Tests that use torch or numpy have these, and the modules of their actors, which each actor would import by itself.
    """
    defaults, module = aiodaft.Runtime.__init__.__kwdefaults__, vars(request.module)
    default = defaults["preload"]
    arrays = ["numpy"] * ("np" in module) + ["numpy", "torch"] * ("torch" in module)
    defaults["preload"] = module.get("PRELOAD", (*arrays, *_modules_of_actors(module)) if arrays else ())
    if not {"Cluster", "cluster_of", "two_nodes"}.isdisjoint(module):
        NODES.load()
    fork_servers.start(*(name for name in ("numpy", "torch") if name in defaults["preload"]))
    yield
    defaults["preload"] = default


def _modules_of_actors(module: dict[str, Any]) -> list[str]:
    """The modules from which a test module has its actors."""
    actors = [found for found in module.values() if isinstance(found, type) and issubclass(found, aiodaft.Actor)]
    return sorted({actor.__module__ for actor in actors} - {module["__name__"], "aiodaft.actor"})


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, descriptor or segment."""
    before, going_on = Snapshot.take(), open_runtimes()
    yield
    gc.collect()
    left = Snapshot.take().new_since(before)
    if going_on & open_runtimes():
        # A module's runtime keeps its pools, and answers commands of other tests; it is looked at when it ends.
        left = {name: found for name, found in left.items() if name == "processes"}
    assert left == {}


@pytest.fixture
async def own_rt(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """An open runtime with four free GPUs."""
    # Modules that tests themselves have imported, torch among them, are no concern of these actors.
    async with aiodaft.Runtime(gpus=4, share_gpus=True, preload=(), stop_grace=1) as runtime:
        yield runtime


@pytest.fixture
def rt(own_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    """The same, by the name that modules give to `module_rt` if their tests share one."""
    return own_rt


@pytest.fixture
async def hasty_rt(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime that gives cancelled calls hardly any time."""
    async with aiodaft.Runtime(preload=(), cancel_grace=0.1, stop_grace=0.1) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime(preloaded: None) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime for all tests of a module: an import of torch for each test would take minutes."""
    # Tests run next to each other, also where there are GPUs.
    async with aiodaft.Runtime(gpus=4, share_gpus=True) as runtime:
        # The first one starts the fork server, which stays.
        await runtime.stop(await runtime.spawn(Echo))
        yield runtime


@pytest_asyncio.fixture(loop_scope="module")
async def module_rt(shared_runtime: aiodaft.Runtime, nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """The module's runtime, without actors at the beginning and at the end."""
    yield shared_runtime
    await _stop_actors(shared_runtime)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_log_only() -> AsyncIterator[aiodaft.Runtime]:
    """A runtime for tests of a module that keeps no errors for its end."""
    async with aiodaft.Runtime(preload=(), unhandled="log") as runtime:
        # The first one starts the fork server, which stays.
        await runtime.stop(await runtime.spawn(Echo))
        yield runtime


@pytest_asyncio.fixture(loop_scope="module")
async def log_only(shared_log_only: aiodaft.Runtime, nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """The same, without actors at the beginning and at the end."""
    yield shared_log_only
    await _stop_actors(shared_log_only)


async def _stop_actors(runtime: aiodaft.Runtime) -> None:
    for target in actors_of(runtime):
        await runtime.stop(Handle(target, Echo))


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Terminal:
    """The output of a test."""
    return Terminal(capfd)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe: the end that is opened first waits for the other one."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(shared_runtime: aiodaft.Runtime) -> HostDriver:
    """The fake GPU of this process, for all tests of a module."""
    return use_host_devices(0)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_the_end() -> Iterator[None]:
    """Fails the run if a module's runtime left something."""
    before = Snapshot.take()
    yield
    gc.collect()
    assert Snapshot.take().new_since(before) == {}
