"""A read of lent memory is whole once the operations that threads were in are over."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from inside import peer_of

import aiodaft
from aiodaft._runtime.platform.threads import wait_passed
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.reading import Borrowed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel says which threads compute")

# As an operator of torch that is written in Python: it counts the write at its end.
OPERATOR = """
def write(tensor, half_written, compute):
    half_written()
    compute()
    tensor.fill_(1.0)
"""


@contextmanager
def writing(tensor: torch.Tensor) -> Generator[Callable[[], object]]:
    """A thread that has written half of a tensor, and computes until the function that is given is called."""
    names: dict[str, Any] = {"__name__": "torch.operator"}
    exec(OPERATOR, names)
    libc, lock, half_written = ctypes.CDLL(None), ctypes.c_int(), threading.Event()
    libc.pthread_spin_init(ctypes.byref(lock), 0)
    libc.pthread_spin_lock(ctypes.byref(lock))

    def write_half() -> None:
        ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes // 2)
        half_written.set()

    def step() -> None:
        names["write"](tensor, write_half, lambda: libc.pthread_spin_lock(ctypes.byref(lock)))

    thread = threading.Thread(target=step, name="step")
    thread.start()
    half_written.wait()
    try:
        yield lambda: libc.pthread_spin_unlock(ctypes.byref(lock))
    finally:
        libc.pthread_spin_unlock(ctypes.byref(lock))
        thread.join()


@pytest.mark.parametrize("elements", [16, 1 << 20], ids=["small", "large"])
async def test_a_read_during_a_write_that_torch_has_not_counted_yet_fails(elements: int) -> None:
    tensor = torch.zeros(elements)
    async with aiodaft.Runtime(preload=()) as rt:
        store = peer_of(rt).store
        stored = store.keep(tensor, Names("x"), lender=Borrowed(tensor), small=False)
        with writing(tensor) as finish:
            reading = asyncio.get_running_loop().create_task(store.make_ready(stored))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not reading.done()
            assert not stored.ready
            finish()
            with pytest.raises(aiodaft.exceptions.BorrowError, match=r"x.clone\(\)"):
                await reading
        stored.release()


async def test_a_write_to_another_tensor_delays_a_read_until_it_is_over() -> None:
    tensor = torch.ones(1 << 20)
    async with aiodaft.Runtime(preload=()) as rt:
        store = peer_of(rt).store
        stored = store.keep(tensor, Names("x"), lender=Borrowed(tensor), small=False)
        with writing(torch.zeros(2)) as finish:
            reading = asyncio.get_running_loop().create_task(store.make_ready(stored))
            await asyncio.sleep(0)
            finish()
            await reading
        assert stored.ready
        stored.release()


async def test_a_thread_that_computes_in_python_delays_no_read() -> None:
    end = threading.Event()

    def spin() -> None:
        while not end.is_set():
            pass

    def spin_without_a_call() -> None:
        while going:
            pass

    going = [True]
    threads = [threading.Thread(target=target) for target in (spin, spin_without_a_call)]
    for thread in threads:
        thread.start()
    try:
        await wait_passed()
    finally:
        end.set()
        going.clear()
        for thread in threads:
            thread.join()


async def test_a_thread_that_waits_delays_no_read() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        await wait_passed()
    finally:
        end.set()
        thread.join()
