"""A library that stands for the driver's libcuda, where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# As much as tells whether CUDA is initialised.
_SOURCE = """
static int initialized;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return initialized ? 0 : 3; }
"""


def fake_cuda(folder: Path) -> Path | None:
    """Build the library in a folder; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    return library
