"""The example for a user of one GPU, on a GPU: `pytest -m gpu`. On the CPU, it is run with the other examples."""

from __future__ import annotations

import re

import pytest
import torch
from run_example import run_example

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
]


def test_two_models_share_a_gpu_and_write_what_one_process_writes() -> None:
    output = run_example("one_gpu.py", "--tokens", "64")
    gpu = torch.cuda.get_device_properties(0)
    assert f"both models on: {gpu.name}, {gpu.uuid}" in output
    assert "the texts are equal, bit for bit" in output
    moved = re.search(r"(\d+) bytes, (\d+) of them within the GPU", output)
    assert moved is not None
    # Logits of two bytes, of 32 texts and 32768 tokens; for four batches, 8 times in the warm-up, then 64 times.
    assert int(moved[1]) == int(moved[2]) == 4 * (8 + 64) * 32 * 32768 * 2
