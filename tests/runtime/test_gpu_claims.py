"""One runtime at a time gives a GPU of the machine to its actors."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from actors import NeedsGpu
from inside import awaited, resources_of
from probes import Probe

import aiodaft
from aiodaft._protocol.node.resources import Gpu
from aiodaft._runtime.process import Env, GpuClaims


@pytest.fixture
def gpu() -> str:
    """The id of a GPU that no other test has."""
    return f"GPU-{uuid4()}"


def machine(*gpus: str) -> Env:
    """A machine with these GPUs."""
    return Env(gpus=lambda: [Gpu(gpu) for gpu in gpus])


def test_a_gpu_is_claimed_by_one_at_a_time_and_the_other_hears_by_whom(gpu: str) -> None:
    first, second = GpuClaims([gpu]), GpuClaims(["", gpu])
    assert first.take(0) is None
    assert first.take(0) is None
    who = second.take(1)
    assert who is not None
    assert who.startswith(f"pid {os.getpid()} (")
    assert "python" in who
    first.give_back(0)
    first.give_back(0)
    assert second.take(1) is None
    second.close()


def test_what_was_declared_by_hand_is_not_claimed() -> None:
    first, second = GpuClaims(["", ""]), GpuClaims([])
    assert [each.take(number) for each in (first, second) for number in range(3)] == [None] * 6


def test_a_claim_ends_with_its_process_and_is_not_kept_by_what_that_has_started(gpu: str) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from aiodaft._runtime.process import GpuClaims\n"
        "claims = GpuClaims([sys.argv[1]])\n"
        "assert claims.take(0) is None\n"
        "child = subprocess.Popen(['sleep', '1000'], close_fds=False, stdin=-3, stdout=-3, stderr=-3)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, gpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    mine = GpuClaims([gpu])
    try:
        assert f"pid {holder.pid} ({sys.executable} -c import os" in (mine.take(0) or "")
        holder.kill()
        holder.communicate()
        assert Path(f"/proc/{child}").exists()
        assert mine.take(0) is None
    finally:
        os.kill(child, 9)
        holder.kill()
        holder.communicate()
        mine.close()


async def test_two_runtimes_of_a_machine_do_not_give_away_the_same_gpu(gpu: str) -> None:
    async with (
        aiodaft.Runtime(preload=(), env=machine(gpu)) as one,
        aiodaft.Runtime(preload=(), env=machine(gpu)) as two,
    ):
        half = await one.on(gpus=0.5).spawn(Probe)
        other = await one.on(gpus=0.5).spawn(Probe)
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources, match=rf"GPU 0 is in use by pid {os.getpid()} \(.*share_gpus"
        ):
            await two.spawn(NeedsGpu)
        await one.stop(half)
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match="GPU 0 is in use by"):
            await two.spawn(NeedsGpu)
        await one.kill(other)
        assert await (await two.spawn(NeedsGpu)).visible() == "0"
    async with aiodaft.Runtime(preload=(), env=machine(gpu)) as three:
        assert await (await three.spawn(NeedsGpu)).visible() == "0"


async def test_a_wait_ends_when_another_runtime_gives_back_a_gpu(gpu: str) -> None:
    async with (
        aiodaft.Runtime(preload=(), env=machine(gpu)) as one,
        aiodaft.Runtime(preload=(), env=machine(gpu)) as two,
    ):
        holder = await one.spawn(NeedsGpu)
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match=r"in use by .* \(waited 0.01 s\)"):
            await two.on(wait=0.01).spawn(NeedsGpu)
        waiting = asyncio.get_running_loop().create_task(awaited(two.on(wait=20).spawn(NeedsGpu)))
        # It has been refused when both runtimes have answered others.
        assert (await resources_of(two))[1] == (await resources_of(two))[0]
        await one.stop(holder)
        assert await (await waiting).visible() == "0"


async def test_a_claim_that_was_given_back_ends_the_wait_for_it(gpu: str) -> None:
    first, second = GpuClaims([gpu]), GpuClaims([gpu])
    assert first.take(0) is None
    assert second.take(0) is not None
    first.give_back(0)
    await second.given_back()
    # Nothing is known of others' claims now.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await second.given_back()
    assert first.take(0) is None
    assert second.take(0) is not None
    waiting = asyncio.get_running_loop().create_task(second.given_back())
    await asyncio.sleep(0)
    first.close()
    await waiting
    assert second.take(0) is None
    second.close()


async def test_a_runtime_takes_a_gpu_that_no_other_has_or_shares_one(gpu: str) -> None:
    env = machine(gpu, f"{gpu}-second")
    async with aiodaft.Runtime(preload=(), gpus=2, env=env) as one, aiodaft.Runtime(preload=(), env=env) as two:
        assert await (await one.spawn(NeedsGpu)).visible() == "0"
        assert await (await two.spawn(NeedsGpu)).visible() == "1"
        async with aiodaft.Runtime(preload=(), env=env, share_gpus=True) as three:
            assert await (await three.spawn(NeedsGpu)).visible() == "0"


async def test_a_forked_child_keeps_no_claim(gpu: str) -> None:
    free, stop = os.pipe()
    async with aiodaft.Runtime(preload=(), env=machine(gpu)) as rt:
        await rt.spawn(NeedsGpu)
        child = os.fork()
        if not child:
            os.close(stop)
            os.read(free, 1)
            os._exit(0)
    other = GpuClaims([gpu])
    try:
        assert other.take(0) is None
    finally:
        other.close()
        os.close(stop)
        os.close(free)
        await asyncio.to_thread(os.waitpid, child, 0)


_PROGRAM = """
import sys
import aiodaft
from aiodaft._protocol.node.resources import Gpu
from aiodaft._runtime.process import Env

async def main():
    async with aiodaft.Runtime(preload=(), env=Env(gpus=lambda: [Gpu(sys.argv[1])])) as rt:
        actor = await rt.on(gpus=0.5).spawn(aiodaft.Actor)
        print((await rt.info(actor)).gpus, flush=True)
        sys.stdin.read()

aiodaft.run(main())
"""


@pytest.fixture
def other(gpu: str) -> Iterator[subprocess.Popen[str]]:
    """A program with an actor on half of the GPU."""
    command = [sys.executable, "-c", _PROGRAM, gpu]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "(0,)\n"
        yield program
        program.kill()


async def test_two_programs_do_not_give_away_the_same_gpu_and_a_kill_frees_it(
    gpu: str, other: subprocess.Popen[str]
) -> None:
    async with aiodaft.Runtime(preload=(), env=machine(gpu)) as rt:
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match=rf"GPU 0 is in use by pid {other.pid} \("):
            await rt.spawn(NeedsGpu)
        other.kill()
        assert await (await rt.on(wait=20).spawn(NeedsGpu)).visible() == "0"
