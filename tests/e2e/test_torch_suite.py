"""The backend tests that torch ships, over `process_group("aiodaft")`; chosen as for gloo, with two ranks on CPUs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiodaft

pytest.importorskip("expecttest", reason="the tests of torch need it: pip install expecttest")
pytest.importorskip("torch.distributed")

from torch_suite import TESTS, SuiteRank

PRELOAD = ("torch_suite",)
pytestmark = [
    pytest.mark.programs,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"]),
]

# By the reason why they say nothing of this backend.
NOT_OURS = {
    "of gloo itself: its name, its monitored barrier, its time limits, and it beside another backend": {
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
        "test_batch_isend_irecv_mixed_backend_err",
        "test_get_backend",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
    },
    "need GPUs, four ranks or torchvision": {
        "test_SyncBatchNorm_process_group",
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_batch_isend_irecv_op_err",
        "test_new_subgroups_with_group_param",
    },
}


async def test_what_gloo_passes_of_the_tests_of_torch_passes_here(module_rt: aiodaft.Runtime, tmp_path: Path) -> None:
    for name in ("barrier", "test_dir", "init_dir"):
        (tmp_path / name).mkdir()
    ranks = await module_rt.group(2, SuiteRank, tmp_path)
    results: dict[str, set[str]] = {}
    for name in sorted(set(TESTS).difference(*NOT_OURS.values())):
        found = await asyncio.gather(*ranks.all(SuiteRank.run, name), return_exceptions=True)
        results[name] = {repr(one) if isinstance(one, BaseException) else one.partition(":")[0] for one in found}
    assert {name: found for name, found in results.items() if not found <= {"passed", "skipped"}} == {}
    assert sum(found == {"passed"} for found in results.values()) >= 91
