"""The runtime's questions to torch about its GPUs, with a torch that has recorded it; tests/gpu has the real one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodaft._runtime.objects.devices import Gpus


def test_only_streams_that_are_not_current_anyway_are_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch makes the device of a stream current, too, and with that a context on it.
    current: list[int] = []

    @contextmanager
    def stream(one: Any) -> Generator[None]:
        current.append(one.cuda_stream)
        try:
            yield
        finally:
            current.pop()

    torch = SimpleNamespace(cuda=SimpleNamespace(stream=stream))
    monkeypatch.setattr("aiodaft._runtime.objects.devices._torch", lambda: torch)
    default, side, other = (SimpleNamespace(cuda_stream=number) for number in (0, 7, 9))
    with Gpus().using([default, default]):
        assert current == []
    with Gpus().using([side, default, other]):
        assert current == [7, 9]
    assert current == []
