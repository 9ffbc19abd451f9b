"""The processes that have CUDA, and the GPUs that they see: `pytest -m gpu`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_actors import GpuKeeper
from inside import fork_server_of, resources_of
from on_gpu import ON_OWN_LOOPS, memory_by_process
from probes import Probe

import aiodaft
from aiodaft._runtime.process import machine_gpus

pytestmark = ON_OWN_LOOPS


def has_cuda(pid: int) -> bool:
    """Whether a process has memory of a GPU."""
    return pid in memory_by_process()


def cuda_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "initialises CUDA" in record.message]


def id_of_the_first_gpu() -> str:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


async def test_actors_have_cuda_and_the_fork_server_has_none(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodaft.Runtime(preload=("torch", "cuda_at_import"), share_gpus=True) as rt:
        keepers = [await rt.spawn(GpuKeeper) for _ in range(2)]
        assert [(await keeper.where(keeper.make(8, 1.0)))[::2] for keeper in keepers] == [("cuda", 8.0)] * 2
        assert has_cuda((await rt.info(keepers[0])).pid)
        # Without NVML, that module initialises CUDA, and the actors are new interpreters.
        assert has_cuda(fork_server_of(rt)) == bool(cuda_warnings(caplog))
        assert await (await rt.spawn(Probe)).has_module("cuda_at_import") != bool(cuda_warnings(caplog))


async def test_a_module_that_uses_a_gpu_at_its_import_is_named_and_actors_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with aiodaft.Runtime(preload=("torch", "cuda_memory_at_import"), share_gpus=True) as rt:
        keeper = await rt.spawn(GpuKeeper)
        assert (await keeper.where(keeper.make(8, 1.0)))[::2] == ("cuda", 8.0)
        (warning,) = cuda_warnings(caplog)
        assert "the import of cuda_memory_at_import" in warning


async def test_gpus_are_found_and_named_as_cuda_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = id_of_the_first_gpu()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    assert len(machine_gpus()) == torch.cuda.device_count() or visible
    # In a sandbox that does not tell the ids of GPUs, any id may be one.
    unknown = int(not all(gpu.uuid for gpu in machine_gpus()))
    for names, count in (
        ("0", 1), (uuid, 1), (uuid[:12], 1), ("", 0), ("-1", 0), ("GPU-x", unknown), (f"{uuid},x,1", 1),
    ):  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        async with aiodaft.Runtime(preload=("torch",), share_gpus=True) as rt:
            assert (await resources_of(rt))[0]["gpus"] == count
            if names in {"0", uuid}:
                keeper = await rt.on(gpus=1).spawn(GpuKeeper)
                assert uuid.endswith((await keeper.where(keeper.make(8, 1.0)))[1].removeprefix("GPU-"))


async def test_gpus_that_do_not_exist_are_errors_of_their_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(machine_gpus())
    async with aiodaft.Runtime(gpus=count + 1, share_gpus=True) as rt:
        keepers = [await rt.on(gpus=1).spawn(GpuKeeper) for _ in range(count)]
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            await rt.on(gpus=1).spawn(GpuKeeper)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            await keepers[0].make_on(7, 8)
        assert (await keepers[0].where(keepers[0].make(8, 1.0)))[2] == 8.0


async def test_two_programs_do_not_use_one_gpu_unless_they_share_it() -> None:
    code = (
        "import sys, aiodaft\n"
        "async def main():\n"
        "    async with aiodaft.Runtime(preload=(), share_gpus=bool(sys.argv[1])) as rt:\n"
        "        await rt.on(gpus=(await rt.nodes())[0].total['gpus']).spawn(aiodaft.Actor)\n"
        "        print('spawned')\n"
        "aiodaft.run(main())\n"
    )
    async with aiodaft.Runtime(preload=()) as rt:
        await rt.on(gpus=1).spawn(aiodaft.Actor)
        refused, shared = await asyncio.gather(*(run("-c", code, share) for share in ("", "yes")))
    assert f"GPU 0 is in use by pid {os.getpid()} (" in refused.stderr
    assert shared.stdout == "spawned\n"


async def test_a_controller_without_a_gpu_is_told_what_to_do_and_the_host_s_memory_leads_to_it() -> None:
    script = Path(__file__).parents[1] / "support" / "blind_controller.py"
    ended = await run(str(script), CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["visible"] == 0
    assert any("return x.cpu()" in line for line in found["refusal"])
    assert found["between actors"] == 2.0 * (1 << 18)
    assert found["through the host"] == ["cpu", 3.0 * (1 << 18)]
    assert found["to an actor"] == "cpu"
    assert found["into"] == 4.0 * (1 << 18)


async def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *args,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(args, process.returncode, out.decode(), err.decode())
