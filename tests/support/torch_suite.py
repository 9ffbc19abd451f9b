"""Members that run the backend tests that torch ships, over the process group of aiodaft.

The tests are chosen as for gloo on CPUs; each member is a rank of each of them.
"""

from __future__ import annotations

import os
import sys
import unittest
import warnings
from pathlib import Path
from unittest.mock import patch

# The module of tests reads them, and its arguments, when it is loaded; nobody else is to see them.
_VARIABLES = {"BACKEND": "gloo", "WORLD_SIZE": "2", "INIT_METHOD": "file://"}
_arguments, sys.argv = sys.argv, sys.argv[:1]

import torch.distributed as dist  # noqa: E402

with warnings.catch_warnings(action="ignore"), patch.dict(os.environ, _VARIABLES):
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import aiodaft  # noqa: E402

sys.argv = _arguments


class Case(TestDistBackend, DistributedTest._DistTestBase):  # noqa: SLF001 - all of its tests are there
    """The tests; what they wait for by files, they wait for by a barrier."""

    def _barrier(self, *_: object, **__: object) -> None:
        dist.barrier()


TESTS = sorted(name for name in dir(Case) if name.startswith("test_"))


class SuiteRank(aiodaft.Actor):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ |= {**_VARIABLES, "TEMP_DIR": str(folder)}

    @aiodaft.method
    def run(self, name: str) -> str:
        """Run a test; returns "passed", or why it was skipped."""
        with aiodaft.current_group().process_group("aiodaft"):
            case = Case(name)
            case.rank = dist.get_rank()
            case.file_name = f"{self.folder}/file"
            set_rng_seed()
            try:
                getattr(case, name)()
            except unittest.SkipTest as skipped:
                return f"skipped: {skipped}"
            except SystemExit as skipped:
                return f"skipped: exit code {skipped.code}"
            return "passed"
