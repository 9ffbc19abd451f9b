"""The fixtures `daft`, `daft_cluster` and `daft_faults`, in runs of pytest of their own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.programs

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

HEADS = {
    "strict": """
        import pytest, pytest_asyncio
        pytestmark = pytest.mark.asyncio
        counter = pytest_asyncio.fixture(make_counter, name="counter")

        @pytest.mark.asyncio(loop_scope="module")
        async def test_the_loop_of_the_test(daft):
            assert await (await daft.spawn(Counter)).add(1) == 1

        class Local(Counter):
            pass

        async def test_a_class_of_the_test_module(daft_cluster):
            assert await (await daft_cluster.spawn(Local)).add(1) == 1
    """,
    "auto": """
        import pytest
        counter = pytest.fixture(make_counter, name="counter")

        def test_error_without_a_loop(daft):
            pass
    """,
    "anyio": """
        import pytest
        pytestmark = pytest.mark.anyio
        counter = pytest.fixture(make_counter, name="counter")

        @pytest.fixture(params=["asyncio"])
        def anyio_backend(request):
            return request.param
    """,
}

IN_PROCESSES = ("test_actors_have_processes", "test_actors_have_nodes")


def run(pytester: pytest.Pytester, mode: str, *options: str) -> tuple[set[str], set[str], str]:
    """Run the tests; returns those that passed, those that did not, and the output."""
    asyncio_mode = "auto" if mode == "auto" else "strict"
    ini = f"asyncio_mode = {asyncio_mode}\nasyncio_default_fixture_loop_scope = function"
    pytester.makeini(f"[pytest]\npythonpath = {ROOT / 'tests' / 'support'}\n{ini}\n")
    plugins = ("-p", "aiodaft_pytest", "-p", "no:cacheprovider", "--strict-markers", "-W", "error")
    ended = pytester.runpytest_subprocess(*plugins, "-rpfE", "--timeout=50", *options, timeout=100)
    outcome: dict[str, set[str]] = {"PASSED": set(), "FAILED": set(), "ERROR": set()}
    for line in ended.outlines:
        kind, _, name = line.partition(" ")
        if kind in outcome:
            outcome[kind].add(name.partition("::")[2].split(" - ")[0].split("[")[0].strip())
    bad = outcome["FAILED"] | outcome["ERROR"]
    return outcome["PASSED"] - bad, bad, ended.stdout.str()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", HEADS)
def test_the_fixtures_serve_each_plugin_of_async_tests(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makepyfile(test_it="from plugin_tests import *\n" + dedent(HEADS[mode]))
    # Once is enough for tests that do not depend on the plugin.
    left_out = [] if mode == "strict" else [f"--deselect=test_it.py::{name}" for name in IN_PROCESSES]
    passed, bad, output = run(pytester, mode, *left_out)
    assert {name for name in bad if not name.startswith(("test_error", "test_failed"))} == set(), output
    assert {name for name in passed if name.startswith(("test_error", "test_failed"))} == set(), output
    assert "test_actors_live_in_the_process_of_the_test" in passed
    assert len(re.findall(r"^test_it.py::test_\w+\S* leaks:$", output, re.MULTILINE)) == 1, output
    assert re.search(r"^test_it.py::test_error_what_is_left\S* leaks:$", output, re.MULTILINE)
    for line in ("- the ref of Counter.add is held", "- the task 'forgotten' runs, at ", "-c input()) runs"):
        assert line in output
    assert "only `daft_cluster` has nodes" in output


def test_a_run_that_uses_no_fixture_loads_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_nothing_is_loaded():
            assert not {"aiodaft", "aiodaft_transport", "torch", "numpy"} & sys.modules.keys()
    """)
    passed, bad, output = run(pytester, "auto")
    assert (passed, bad) == ({"test_nothing_is_loaded"}, set()), output


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"aiodaft_pytest": "aiodaft_pytest"}
