"""The meaning of the variables of engines."""

from __future__ import annotations

import pytest

from aiodaft.cli.run import ALONE, Task, find_task

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "head.local", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n7", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip


def test_without_an_engine_a_process_is_alone() -> None:
    assert find_task({}) is ALONE
    assert find_task({"RANK": "0", "WORLD_SIZE": "2"}) is ALONE


def test_the_script_of_sbatch_is_no_task() -> None:
    assert find_task({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}) is ALONE


def test_the_variables_of_srun() -> None:
    expected = Task(2, 3, "slurm-17-0", node="n7", seen_from="10.0.0.1", signals_all=True)
    assert find_task(SLURM) == expected
    assert find_task({**SLURM, "SLURM_CLUSTER_NAME": "west"}).job == "slurm-west-17-0"


def test_the_variables_of_torchrun_count_also_under_slurm() -> None:
    expected = Task(1, 4, "torchrun-head.local-29500-run_1", listen_at="head.local")
    assert find_task({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "run/1"}) == expected


def test_one_task_on_each_machine() -> None:
    for variables in (
        {**TORCHRUN, "LOCAL_RANK": "1"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
        {**SLURM, "SLURM_LOCALID": "1"},
        # Also the first one of each machine, which would wait for the others.
        {**SLURM, "SLURM_STEP_NUM_NODES": "2"},
    ):
        with pytest.raises(ValueError, match="several tasks of the job are on one machine"):
            find_task(variables)
    assert find_task({**SLURM, "SLURM_STEP_NUM_NODES": "3"}).size == 3
    assert find_task({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}).size == 4


@pytest.mark.parametrize("changed", [{"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}, {"LOCAL_RANK": "x"}])
def test_contradictions_are_refused(changed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="the engine says"):
        find_task({**TORCHRUN, **changed})
