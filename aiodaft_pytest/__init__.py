"""The pytest plugin of aiodaft: the fixtures `daft`, `daft_cluster` and `daft_faults`.

pytest loads this at the start of every run in an environment that has aiodaft. It is a package of its own, because it
must not load aiodaft before a test uses one of the fixtures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

if TYPE_CHECKING:
    from aiodaft import Runtime
    from aiodaft.testing import Faults

_KINDS: Final = ("daft", "daft_cluster")
_LOOP_SCOPES: Final[tuple[Literal["function", "class", "module", "package", "session"], ...]] = (
    "function", "class", "module", "package", "session",
)  # fmt: skip
_MARKER: Final = (
    "daft(nodes=None, leaks=True, **options): the number of nodes of `daft_cluster`, whether the end of the test looks "
    "for leaks, and options of aiodaft.Runtime"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    # An async fixture belongs to the plugin that runs it, and with pytest-asyncio to a loop.
    made = ModuleType("aiodaft_pytest_fixtures")
    for kind in _KINDS:
        setattr(made, f"_{kind}_anyio", pytest.fixture(_opening(kind), name=f"_{kind}_anyio"))
    if config.pluginmanager.hasplugin("asyncio"):
        import pytest_asyncio  # noqa: PLC0415 - optional

        for kind, scope in product(_KINDS, _LOOP_SCOPES):
            name = f"_{kind}_asyncio_{scope}"
            setattr(made, name, pytest_asyncio.fixture(_opening(kind), loop_scope=scope, name=name))
    config.pluginmanager.register(made, made.__name__)


def _opening(kind: str) -> Callable[..., AsyncIterator[Runtime]]:
    async def open_runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
        from aiodaft.testing.fixtures import opened  # noqa: PLC0415 - loaded by the first test that needs it

        async with opened(kind, request.node) as runtime:
            yield runtime  # noqa: ASYNC119 - pytest runs a fixture to its end

    return open_runtime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None and not set(_KINDS).isdisjoint(getattr(item, "fixturenames", ())):
        from aiodaft.testing.fixtures import FAILED  # noqa: PLC0415 - as above

        # The traceback keeps the test's objects.
        item.stash[FAILED] = True
    return (yield)


@pytest.fixture
def daft(request: pytest.FixtureRequest) -> Runtime:
    """An open runtime whose actors live in the process of the test; see `aiodaft.testing.in_process`."""
    runtime: Runtime = _runtime(request, "daft")
    return runtime


@pytest.fixture
def daft_cluster(request: pytest.FixtureRequest) -> Runtime:
    """An open runtime whose actors have processes; with `pytest.mark.daft(nodes=2)`, on the nodes n1 and n2."""
    runtime: Runtime = _runtime(request, "daft_cluster")
    return runtime


@pytest.fixture
def daft_faults(request: pytest.FixtureRequest) -> Iterator[Faults]:
    """Kills, stops and delays actors of the other fixtures, and cuts connections; see `aiodaft.testing.Faults`."""
    from aiodaft.testing.fixtures import pids_of_nodes  # noqa: PLC0415 - as above
    from aiodaft.testing.in_process import Faults  # noqa: PLC0415 - as above

    # It ends before the runtime, which has to stop actors that may be stopped.
    for kind in _KINDS:
        if kind in request.fixturenames:
            request.getfixturevalue(kind)
    faults = Faults(pids_of_nodes(request.node))
    yield faults
    faults.resume_all()


def _runtime(request: pytest.FixtureRequest, kind: str) -> Any:
    if "anyio_backend" in request.fixturenames:
        backend = request.getfixturevalue("anyio_backend")
        if backend != "asyncio" and backend[0] != "asyncio":
            pytest.skip("actors need asyncio")
        return request.getfixturevalue(f"_{kind}_anyio")
    marker = request.node.get_closest_marker("asyncio")
    if marker is None:
        raise pytest.UsageError(
            f"{request.node.nodeid} is no async test, or no plugin runs it: `{kind}` needs pytest.mark.asyncio (of "
            "pytest-asyncio, unless its mode is auto) or pytest.mark.anyio"
        )
    scope = marker.kwargs.get("loop_scope") or request.config.getini("asyncio_default_test_loop_scope")
    return request.getfixturevalue(f"_{kind}_asyncio_{scope}")
