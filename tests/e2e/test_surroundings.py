"""The common part of an actor's process and the controller: environment, working directory, sys.path, sys.argv."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from inside import resources_of
from probes import Importing, Probe
from supervised import AT_ONCE

import aiodaft
from aiodaft import Restart
from aiodaft._runtime import owning

MARK, GONE = "AIODAFT_TEST_MARK", "AIODAFT_TEST_GONE"


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("fork", [True, False])
async def test_an_actor_gets_what_the_controller_has_when_it_is_spawned(
    fork: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(GONE, "1")
    # No UTF-8, and not in the environment that a process can start with: the limits of a variable.
    monkeypatch.setenv(MARK, "before \udcff")
    async with aiodaft.Runtime(preload=(), fork=fork) as rt:
        first = await rt.spawn(Probe)
        before = await first.surroundings((MARK, GONE))
        monkeypatch.setenv(MARK, "after")
        monkeypatch.delenv(GONE)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("added")
        monkeypatch.setattr(sys, "argv", ["program", "--flag"])
        monkeypatch.setenv("TZ", "EAST-9")
        second = await rt.spawn(Probe)
        assert await second.utc_offset() == "+0900"
        now = {MARK: "after", GONE: None}, str(tmp_path), sys.path, ["program", "--flag"]
        assert await second.surroundings((MARK, GONE)) == now
        monkeypatch.undo()
        assert before == await first.surroundings((MARK, GONE))
        assert before == ({MARK: "before \udcff", GONE: "1"}, os.getcwd(), sys.path, sys.argv)
        third = await rt.spawn(Probe)
        assert await third.surroundings((MARK, GONE)) == ({MARK: None, GONE: None}, *before[1:])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_share_of_the_machine_goes_before_what_the_controller_has(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the controller itself uses no GPU: this changes nothing in the variables of actors.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one, none = await rt.on(gpus=1).spawn(Probe), await rt.spawn(Probe)
    assert (await one.environ("CUDA_VISIBLE_DEVICES"), await none.environ("CUDA_VISIBLE_DEVICES")) == ("0", "")


async def test_what_all_actors_share_is_imported_with_the_environment_of_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with aiodaft.Runtime(preload=("environment_at_import",), gpus=1, cpus=1) as rt:
        monkeypatch.setenv(MARK, "as it is now")
        probe = await rt.on(cpus=1, gpus=1).spawn(Probe)
        assert await probe.environ("OMP_NUM_THREADS") == "1"
        assert await probe.seen_at_import("OMP_NUM_THREADS") is None
        assert await probe.seen_at_import(MARK) == "as it is now"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_actor_that_is_restarted_gets_what_it_had_at_first(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(MARK, "first")
    monkeypatch.chdir(tmp_path)
    probe = await rt.on(restart=Restart(backoff=AT_ONCE)).spawn(Probe)
    before = await probe.surroundings((MARK,))
    monkeypatch.undo()
    os.kill(await probe.pid(), signal.SIGKILL)
    while (await rt.info(probe)).epoch == 0:
        pass
    assert await probe.surroundings((MARK,)) == before
    assert before[:2] == ({MARK: "first"}, str(tmp_path))


@pytest.mark.parametrize("preload", [(), ("of_many",)])
async def test_packages_that_each_actor_imports_by_itself_are_named_once(
    preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    package = tmp_path / "of_many"
    package.mkdir()
    names = [f"part{number}" for number in range(100)]
    for name in names:
        (package / f"{name}.py").touch()
    (package / "__init__.py").write_text("".join(f"from . import {name}\n" for name in names))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(owning, "SLOW", 0.0)
    async with aiodaft.Runtime(preload=preload) as rt:
        await rt.group(3, Importing, "of_many")
    found = [record.getMessage() for record in caplog.records if "imported of_many" in record.getMessage()]
    assert len(found) == (0 if preload else 1)
    assert all("Runtime(preload=('of_many',)) has them imported once, for all actors" in text for text in found)


async def test_an_actor_has_variables_and_a_folder_of_its_own_also_after_a_restart(tmp_path: Path) -> None:
    async with aiodaft.Runtime(preload=("environment_at_import",)) as rt:
        own = rt.on(env={MARK: "own"}, cwd=tmp_path, restart=Restart(intensity=None, backoff=AT_ONCE))
        probe, other = await own.spawn(Probe), await rt.spawn(Probe)
        for epoch in range(2):
            variables, folder, path, argv = await probe.surroundings((MARK, "PATH"))
            assert (variables, folder) == ({MARK: "own", "PATH": os.environ["PATH"]}, str(tmp_path))
            assert (path[: len(sys.path)], argv) == (sys.path, sys.argv)
            # It also counts for code that reads it when it is imported.
            assert await probe.seen_at_import(MARK) == "own"
            os.kill(await probe.pid(), signal.SIGKILL)
            while (await rt.info(probe)).epoch == epoch:
                pass
        assert (await other.surroundings((MARK,)))[:2] == ({MARK: None}, os.getcwd())


async def test_an_actor_has_an_interpreter_of_its_own_with_its_packages(tmp_path: Path) -> None:
    python = another_python(tmp_path)
    async with aiodaft.Runtime(preload=()) as rt:
        probe, other = await rt.on(python=python).spawn(Probe), await rt.spawn(Probe)
        # The actors that it spawns have it, too; those of the program have not.
        assert await probe.only_there() == await probe.from_a_child() == (2, str(python))
        with pytest.raises(ModuleNotFoundError, match="only_there"):
            await other.only_there()
        # Values go from one to the other.
        assert await other.echo(probe.echo("value")) == "value"


def another_python(folder: Path) -> Path:
    """A virtual environment with a module that others do not have, and the packages that aiodaft needs."""
    own = Path(sysconfig.get_path("purelib"))
    packages = folder / own.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    (packages / "only_there.py").write_text("VERSION = 2")
    (packages / "aiodaft.pth").write_text(str(own))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    return folder / "bin" / "python"


@pytest.mark.asyncio(loop_scope="module")
async def test_surroundings_that_cannot_be_are_refused(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    free = await resources_of(rt)
    wrong: Any
    for wrong, missing in (({"cwd": tmp_path / "no"}, "folder"), ({"python": tmp_path / "no"}, "interpreter")):
        with pytest.raises(aiodaft.SpawnFailed, match=rf"on\((cwd|python)='{tmp_path}/no'\): .* has no such {missing}"):
            await rt.on(gpus=1, **wrong).spawn(Probe)
    assert await resources_of(rt) == free
    for wrong, kind, text in (
        ({"env": {"A": 1}}, TypeError, "env: 'A': 1 is not a string with a string"),
        ({"env": {"A=B": "1"}}, ValueError, "env: 'A=B' is no name of a variable"),
        ({"cwd": 1}, TypeError, "cwd=1: a path is needed"),
        ({"python": "python", "with_": await rt.spawn(Probe)}, ValueError, "python cannot be combined with with_"),
    ):
        with pytest.raises(kind, match=text):
            rt.on(**wrong)
    with pytest.raises(ValueError, match=r"on\(python=...\) is for actors, not for a mesh"):
        rt.on(python="python").mesh(hosts=1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_working_directory_that_is_gone_fails_the_spawn_and_says_what_to_do(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    guest_of = await rt.spawn(Probe)
    directory.rmdir()
    free = await resources_of(rt)
    with pytest.raises(aiodaft.SpawnFailed, match=r"working directory of this process, which is gone .*os\.chdir\(\)"):
        await rt.on(gpus=1).spawn(Probe)
    assert await resources_of(rt) == free
    # It needs no process of its own.
    assert await (await rt.on(with_=guest_of).spawn(Probe)).pid() == await guest_of.pid()
    monkeypatch.undo()
    assert (await (await rt.spawn(Probe)).surroundings(()))[1] == os.getcwd()


async def test_a_restart_in_a_directory_that_is_gone_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    with pytest.raises(ExceptionGroup) as failed:
        async with aiodaft.Runtime(preload=()) as rt, rt.scope() as scope:
            with monkeypatch.context() as patch:
                patch.chdir(directory)
                probe = await scope.on(restart=Restart(intensity=1, backoff=AT_ONCE)).spawn(Probe)
            directory.rmdir()
            os.kill(await probe.pid(), signal.SIGKILL)
            # The limit of restarts ends the block.
            await asyncio.Event().wait()
    limit = failed.value.exceptions[0]
    assert isinstance(limit, aiodaft.exceptions.RestartLimitReached)
    assert isinstance(limit.attempts[-1], aiodaft.SpawnFailed)
    assert f"when it spawned the actor cannot be entered: [Errno 2] No such file or directory: '{directory}'" in str(
        limit.attempts[-1]
    )


@pytest.mark.parametrize("run", ["aiodaft.run", "asyncio.run"])
@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-"])
def test_a_program_may_be_started_without_standard_streams(run: str, closed: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys, aiodaft
from probes import Probe

async def main():
    async with aiodaft.Runtime(preload=()) as rt:
        pathlib.Path(sys.argv[1]).write_text(str(await (await rt.spawn(Probe)).pid()))

{run}(main())
"""
    path, env = tmp_path / "pid", {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert path.read_text()
