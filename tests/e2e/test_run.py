"""`aiodaft run`: alone, and as the tasks of a job of Slurm, or of an engine that sets torchrun's variables."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import job_script
import pytest
from leaks import wait_ended
from slurm import running_slurm, why_not

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"
MISSING = why_not()
RUN = [sys.executable, "-m", "aiodaft.cli", "run"]
SCRIPT = job_script.__file__
pytestmark = pytest.mark.timeout(180)


@contextmanager
def started(command: list[str], environment: Mapping[str, str]) -> Generator[subprocess.Popen[str]]:
    """A program for the time of the block."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that the script names."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == ["pids"], line
    return list(map(int, line[1:]))


# Alone.


def test_without_an_engine_the_script_has_a_cluster_of_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, asyncio, aiodaft\n"
        "async def main():\n"
        "    async with aiodaft.Runtime() as rt, aiodaft.Runtime() as other:\n"
        "        print(sys.argv[1:], [member.name for member in rt._controller.nodes.members()])\n"
        "    print(os.stat(os.environ['AIODAFT_KEY_FILE']).st_mode & 0o777 == 0o600)\n"
        "aiodaft.run(main())\n"
        "sys.exit(3)\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*RUN, "--name", "here", str(script), "--cpus", "x"],
        env=environment, stdout=subprocess.PIPE, text=True, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "['--cpus', 'x'] ['here']\nTrue\n")
    # Nothing was written.
    assert list(tmp_path.iterdir()) == [script]


def test_sigterm_ends_the_script_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(Path(SCRIPT).read_text().replace('("n1", "n2")', '("here", "here")'))
    environment = {**os.environ, "PYTHONPATH": str(Path(SCRIPT).parent)}
    with started([*RUN, "--name", "here", str(script), "wait", str(tmp_path / "ended")], environment) as process:
        pids = pids_of(process)
        assert pids[1] == process.pid
        process.terminate()
        assert (process.wait(30), (tmp_path / "ended").read_text()) == (143, "in order")
        wait_ended(*pids)


@pytest.mark.programs
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "script.py").write_text(program)
    done = subprocess.run([*RUN, str(tmp_path / "script.py"), "5"], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 4, 9, 16]\n")


def test_down_ends_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'aiodaft.cli', 'down'], check=True)\n"
        "signal.pause()\n"
    )
    assert subprocess.run([*RUN, str(script)], timeout=60).returncode == 143


def test_a_script_that_is_killed_has_the_status_that_a_shell_gives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert subprocess.run([*RUN, str(script)], timeout=50).returncode == 137


# The variables of torchrun.


@contextmanager
def tasks_of(tmp_path: Path, *arguments: str) -> Generator[list[subprocess.Popen[str]]]:
    """Two tasks, one on each "machine", which share a home."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment = {**os.environ, **variables, "HOME": str(tmp_path)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started([*RUN, "--name", f"n{rank + 1}", SCRIPT, *arguments], {**environment, "RANK": str(rank)})
            )
            for rank in (0, 1)
        ]


def test_the_tasks_of_torchrun_are_the_nodes_and_end_with_the_script(tmp_path: Path) -> None:
    with tasks_of(tmp_path) as tasks:
        pids = pids_of(tasks[0])
        assert [task.wait(30) for task in tasks] == [7, 0]
        wait_ended(*pids)
    assert list((tmp_path / ".config" / "aiodaft" / "jobs").iterdir()) == []


def test_the_other_tasks_stay_for_what_the_script_does_when_it_is_told_to_end(tmp_path: Path) -> None:
    with tasks_of(tmp_path, "wait", str(tmp_path / "ended")) as tasks:
        pids = pids_of(tasks[0])
        tasks[1].terminate()
        tasks[0].terminate()
        assert [task.wait(30) for task in tasks] == [143, 0]
        assert (tmp_path / "ended").read_text() == "in order"
        wait_ended(*pids)


@pytest.mark.hosts
def test_the_other_tasks_end_when_the_first_one_is_killed(tmp_path: Path) -> None:
    with tasks_of(tmp_path, "wait", os.devnull) as tasks:
        pids = pids_of(tasks[0])
        tasks[0].kill()
        assert tasks[1].wait(60) == 1
        wait_ended(*pids)


def test_a_job_that_lacks_a_task_ends_and_says_so(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "HOME": str(tmp_path)}
    for rank, why in (
        (
            "0",
            f"not all 2 tasks of the job came within 0.5 s: they look for this one in {tmp_path}/.config/aiodaft/jobs,",
        ),
        ("1", "; --shared names a folder that all machines see"),
    ):
        done = subprocess.run(
            [*RUN, "--wait", "0.5", "--name", "n1", SCRIPT],
            env={**os.environ, **variables, "RANK": rank}, capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert (done.returncode, why in done.stderr) == (1, True), done.stderr


@pytest.mark.programs
@pytest.mark.timeout(150)
def test_a_job_of_torchrun_itself(tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("there is no torchrun (package torch)")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(probe.getsockname()[1])]
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                started(
                    [torchrun, "--nnodes=2", f"--node-rank={rank}", *meeting, "--nproc-per-node=1", "--no-python",
                     *RUN, "--name", f"n{rank + 1}", SCRIPT, "well"],
                    environment,
                )
            )
            for rank in (0, 1)
        ]  # fmt: skip
        wait_ended(*pids_of(agents[0]))
        assert [agent.wait(60) for agent in agents] == [0, 0]


# Slurm.


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    if MISSING is not None:
        pytest.skip(MISSING)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "HOME": str(tmp_path_factory.mktemp("home"))}


def srun(job: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    return ["srun", "--job-name", job, "--nodes=2", "--ntasks-per-node=1", *options, *RUN, SCRIPT, *arguments]


def test_the_tasks_of_srun_are_the_nodes_and_end_with_the_script(slurm: Mapping[str, str]) -> None:
    with started(srun("whole"), slurm) as job:
        pids = pids_of(job)
        job.communicate(timeout=60)
        assert job.returncode == 7
        wait_ended(*pids)
    assert list(Path(slurm["HOME"], ".config", "aiodaft", "jobs").iterdir()) == []


def test_a_job_that_slurm_cancels_ends_in_order(slurm: Mapping[str, str], tmp_path: Path) -> None:
    with started(srun("cancelled", "wait", str(tmp_path / "ended")), slurm) as job:
        pids = pids_of(job)
        subprocess.run(["scancel", "--name", "cancelled"], env=slurm, check=True, timeout=20)
        assert (job.wait(60), (tmp_path / "ended").read_text()) == (143, "in order")
        wait_ended(*pids)
    assert list(Path(slurm["HOME"], ".config", "aiodaft", "jobs").iterdir()) == []


def test_a_job_that_another_one_preempts_ends_in_order(slurm: Mapping[str, str], tmp_path: Path) -> None:
    with started(srun("low", "wait", str(tmp_path / "ended"), options=["--exclusive"]), slurm) as job:
        pids = pids_of(job)
        urgent = ["srun", "--partition", "urgent", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "true"]
        assert subprocess.run(urgent, env=slurm, timeout=80).returncode == 0
        # The nodes were free for the other one when it had ended.
        assert (job.wait(60), (tmp_path / "ended").read_text()) == (143, "in order")
        wait_ended(*pids)
    assert list(Path(slurm["HOME"], ".config", "aiodaft", "jobs").iterdir()) == []


# Slurm's shortest one is a minute.
@pytest.mark.hosts
@pytest.mark.timeout(150)
def test_a_job_that_reaches_its_time_limit_ends_in_order(slurm: Mapping[str, str], tmp_path: Path) -> None:
    with started(srun("limited", "wait", str(tmp_path / "ended"), options=["--time=0:01"]), slurm) as job:
        pids = pids_of(job)
        assert (job.wait(120), (tmp_path / "ended").read_text()) == (143, "in order")
        wait_ended(*pids)


@pytest.mark.hosts
def test_a_script_that_does_not_end_is_killed_after_the_grace_with_all_nodes(slurm: Mapping[str, str]) -> None:
    with started(srun("stuck", "stay"), slurm) as job:
        pids = pids_of(job)
        subprocess.run(["scancel", "--name", "stuck"], env=slurm, check=True, timeout=20)
        rest, _ = job.communicate(timeout=60)
        assert (rest, job.returncode) == ("", 137)
        wait_ended(*pids)
    assert list(Path(slurm["HOME"], ".config", "aiodaft", "jobs").iterdir()) == []


def test_two_tasks_on_one_machine_are_refused(slurm: Mapping[str, str]) -> None:
    command = ["srun", "--ntasks=2", "--nodes=1", "--overcommit", *RUN, SCRIPT]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert done.stderr.count("several tasks of the job are on one machine") == 2
    assert done.returncode == 1


def test_srun_of_python_says_that_each_machine_is_alone(slurm: Mapping[str, str]) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-c", "import aiodaft; aiodaft.Runtime()"]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("srun runs this program on 2 machines")) == (0, 1), done.stderr
