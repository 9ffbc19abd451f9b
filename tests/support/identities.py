"""Clusters for tests, each with a key of its own."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from aiodaft._runtime.connections.identity import Identity, load_identity, write_key_file
from aiodaft.cli.key import new_certificate


@cache
def identity(cluster: int = 0) -> Identity:
    """The identity of one of several clusters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        write_key_file(path, bytes([cluster]) * 32, *new_certificate())
        return load_identity(path)
