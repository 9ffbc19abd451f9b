"""The places of actors: their needs are counted, never overcommitted, and refused with the reason (CR1, section 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from actors import Echo, Entered, NeedsGpu, SlowStart
from cuda_library import fake_cuda
from inside import awaited, controller_of, resources_of
from probes import Half, HalfChild, Probe

import aiodaft
from aiodaft._protocol.node.resources import Gpu
from aiodaft._runtime.process import Env


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def free(rt: aiodaft.Runtime) -> Mapping[str, float]:
    """The free amount of each resource."""
    return (await resources_of(rt))[1]


async def spawn_all(*spawned: aiodaft.typing.Spawned[Any]) -> list[Any]:
    """Spawn side by side; gives handles and errors."""
    return await asyncio.gather(*(awaited(one) for one in spawned), return_exceptions=True)


async def test_resources_are_taken_and_returned_however_an_actor_ends(tmp_path: Any) -> None:
    async with aiodaft.Runtime(preload=(), cpus=4, gpus=4, resources={"disk": 3}) as rt:
        total, everything = await resources_of(rt)
        assert total == everything == {"cpus": 4, "gpus": 4, "disk": 3}
        place = rt.on(cpus=1.5, gpus=2, resources={"disk": 3})
        stopped = await place.spawn(Echo)
        assert await free(rt) == {"cpus": 2.5, "gpus": 2, "disk": 0}
        await rt.stop(stopped)
        assert await free(rt) == everything
        killed = await place.spawn(Echo)
        await rt.kill(killed)
        assert await free(rt) == everything
        async with place.spawn(Echo), rt.on(gpus=1).spawn(Entered, str(tmp_path / "left")):
            assert (await free(rt))["gpus"] == 1
        assert await free(rt) == everything
        async with rt.scope() as scope:
            await scope.on(gpus=4).spawn(Echo)
        assert await free(rt) == everything


@pytest.mark.asyncio(loop_scope="module")
async def test_fractions_share_one_gpu_and_whole_ones_are_exclusive(rt: aiodaft.Runtime) -> None:
    halves = [await rt.on(cpus=0, gpus=0.5, resources={}).spawn(Half) for _ in range(3)]
    assert [(await rt.info(half)).gpus for half in halves] == [(0,), (0,), (1,)]
    whole = await rt.on(gpus=2).spawn(Probe)
    assert (await rt.info(whole)).gpus == (2, 3)
    with pytest.raises(
        aiodaft.exceptions.InsufficientResources, match=r"needs gpus=1, but this node has 4, of which 0.5 free"
    ):
        await rt.spawn(NeedsGpu)
    third = await rt.on(gpus=0.5).spawn(Probe)
    assert (await rt.info(third)).gpus == (1,)
    await rt.stop(halves[2])
    await rt.stop(third)
    assert (await rt.info(await rt.spawn(NeedsGpu))).gpus == (1,)


@pytest.mark.asyncio(loop_scope="module")
async def test_thirds_add_up_to_one(rt: aiodaft.Runtime) -> None:
    thirds = await rt.on(gpus=1 / 3).group(3, Probe)
    assert [(await rt.info(member)).gpus for member in thirds] == [(0,)] * 3
    await rt.stop(thirds)
    assert (await free(rt))["gpus"] == pytest.approx(4)
    assert (await rt.info(await rt.on(gpus=4).spawn(Probe))).gpus == (0, 1, 2, 3)


async def test_a_refusal_says_what_there_is_and_who_has_it() -> None:
    async with aiodaft.Runtime(preload=(), cpus=2, gpus=2, resources={"disk": 3}) as rt:
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources,
            match=r"^Echo-1 needs gpus=3, but this node has 2, of which 2 free$",
        ) as caught:
            await rt.on(gpus=3).spawn(Echo)
        assert caught.value.executed is False
        await rt.on(gpus=1, cpus=2, resources={"disk": 1}).spawn(Probe)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"gpus": 2}, r"needs gpus=2, but this node has 2, of which 1 free: Probe-1 has 1$"),
            ({"cpus": 0.5}, r"needs cpus=0.5, but this node has 2, of which 0 free: Probe-1 has 2$"),
            ({"resources": {"disk": 2.5}}, r"needs disk=2.5, but this node has 3, of which 2 free: Probe-1 has 1$"),
            ({"resources": {"tape": 1}}, r"needs tape=1, but this node has 0.*declare them"),
        ]
        for wish, reason in cases:
            with pytest.raises(aiodaft.exceptions.InsufficientResources, match=reason):
                await rt.on(**wish).spawn(Echo)
        assert await free(rt) == {"cpus": 0, "gpus": 1, "disk": 2}


async def test_without_gpus_the_refusal_says_how_to_declare_some() -> None:
    async with aiodaft.Runtime(preload=(), gpus=0) as rt:
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources, match=r"has 0, of which 0 free; .*Runtime\(gpus=\.\.\.\)"
        ):
            await rt.spawn(NeedsGpu)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"gpus": -1}, r"gpus=-1: resources are numbers that are not negative"),
        ({"gpus": 1.5}, r"gpus=1.5: take whole GPUs, or a fraction of one"),
        ({"gpus": True}, r"gpus=True"),
        ({"gpus": "1"}, r"gpus='1'"),
        ({"gpus": float("nan")}, r"gpus=nan"),
        ({"gpus": float("inf")}, r"gpus=inf"),
        ({"cpus": -0.5}, r"cpus=-0.5"),
        ({"resources": {"disk": -1}}, r"disk=-1"),
        ({"resources": {"disk": "much"}}, r"disk='much'"),
        ({"resources": {"gpus": 1}}, r"gpus"),
        ({"resources": {"cpus": 1}}, r"cpus"),
    ],
)
def test_odd_numbers_are_refused_where_they_are_said(wish: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        aiodaft.Runtime(preload=()).on(**wish)
    with pytest.raises(ValueError, match=reason):
        type("Odd", (aiodaft.Actor,), {}, **wish)


@pytest.mark.parametrize(
    "wish",
    [{"gpus": -1}, {"gpus": 1.5}, {"gpus": "4"}, {"cpus": -1}, {"cpus": float("nan")}, {"resources": {"disk": -1}},
     {"resources": {"gpus": 2}}, {"resources": {"cpus": 2}}],
)  # fmt: skip
def test_a_runtime_with_odd_resources_cannot_be_made(wish: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"resources|GPUs|cpus|gpus"):
        aiodaft.Runtime(**wish)


@pytest.mark.asyncio(loop_scope="module")
async def test_spawns_side_by_side_never_overcommit(rt: aiodaft.Runtime) -> None:
    outcomes = await spawn_all(*(rt.on(gpus=1).spawn(Probe) for _ in range(7)))
    refused = [outcome for outcome in outcomes if isinstance(outcome, aiodaft.exceptions.InsufficientResources)]
    made = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert (len(made), len(refused)) == (4, 3)
    assert sorted([(await rt.info(actor)).gpus for actor in made]) == [(0,), (1,), (2,), (3,)]
    assert len(set(await asyncio.gather(*(actor.pid() for actor in made)))) == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_a_spawn_that_fails_leaves_room_for_its_neighbours(rt: aiodaft.Runtime) -> None:
    outcomes = await spawn_all(*(rt.on(gpus=1).spawn(SlowStart, 0.0, "no" if index % 2 else "") for index in range(4)))
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [False, True, False, True]
    assert (await free(rt))["gpus"] == 2
    with pytest.raises(aiodaft.exceptions.InsufficientResources):
        await rt.on(gpus=1).group(3, Probe)
    assert (await free(rt))["gpus"] == 2
    assert len(await rt.on(gpus=1).group(2, Probe)) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_see_their_own_gpus_only(rt: aiodaft.Runtime) -> None:
    first, second, half = (
        await rt.spawn(NeedsGpu),
        await rt.on(gpus=2).spawn(NeedsGpu),
        await rt.on(gpus=0.5).spawn(Probe),
    )
    assert (await first.visible(), await second.visible()) == ("0", "1,2")
    assert await half.environ("CUDA_VISIBLE_DEVICES") == "3"
    assert (await rt.info(second)).gpus == (1, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_actors_on_a_mesh_see_the_gpus_of_their_slice(rt: aiodaft.Runtime) -> None:
    first = await rt.spawn(NeedsGpu)
    async with rt.mesh(hosts=1, gpus=2) as mesh:
        on_mesh = await mesh[0].group(2, NeedsGpu)
        assert await on_mesh.all(NeedsGpu.visible) == ["1", "2"]
        assert await (await rt.spawn(NeedsGpu)).visible() == "3"
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match="has 2, of which 0 free"):
            await mesh[0].spawn(NeedsGpu)
    with pytest.raises(aiodaft.ActorDied):
        await on_mesh[0].visible()
    again = rt.on(near=first, wait=10).group(2, NeedsGpu)
    assert await (await again).all(NeedsGpu.visible) == ["1", "2"]


async def test_cpus_are_the_number_of_threads_unless_the_user_has_set_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for users in (None, "3"):
        with monkeypatch.context() as patch:
            patch.delenv("OMP_NUM_THREADS", raising=False)
            if users is not None:
                patch.setenv("OMP_NUM_THREADS", users)
            async with aiodaft.Runtime(preload=(), cpus=8) as rt:
                for cpus, threads in ((2.5, "2"), (0.25, "1"), (0, None)):
                    probe = await rt.on(cpus=cpus).spawn(Probe)
                    assert await probe.environ("OMP_NUM_THREADS") == (users or threads)


async def test_gpus_of_a_restricted_controller_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Env(gpus=lambda: [Gpu(f"nvidia{number}", f"GPU-{number}") for number in range(8)])
    # "gpu1" ends the list, as CUDA has it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-3,MIG-abc,gpu1,0")
    async with aiodaft.Runtime(preload=(), env=machine, share_gpus=True) as rt:
        assert (await resources_of(rt))[0]["gpus"] == 3
        assert [await (await rt.spawn(NeedsGpu)).visible() for _ in range(3)] == ["5", "GPU-3", "MIG-abc"]


async def test_on_overrides_the_class_line_and_children_inherit_it() -> None:
    async with aiodaft.Runtime(preload=(), cpus=8, gpus=4, resources={"disk": 4, "tape": 1}) as rt:
        whole = await free(rt)
        for make, used in (
            (lambda: rt.spawn(Half), (1, 0.5, 2)),
            (lambda: rt.spawn(HalfChild), (1, 2, 2)),
            (lambda: rt.on(gpus=1).spawn(Half), (1, 1, 2)),
            (lambda: rt.on(cpus=0, gpus=0, resources={}).spawn(Half), (0, 0, 0)),
            (lambda: rt.on(resources={"tape": 1}).spawn(Half), (1, 0.5, 0)),
        ):
            made: Callable[[], aiodaft.typing.Spawned[Any]] = make
            async with made():
                left = await free(rt)
                assert tuple(whole[name] - left[name] for name in ("cpus", "gpus", "disk")) == used
        assert await free(rt) == whole


@pytest.mark.asyncio(loop_scope="module")
async def test_with_lives_in_the_same_process_and_shares_its_gpus(rt: aiodaft.Runtime) -> None:
    host = await rt.on(gpus=2).spawn(Probe)
    guest = await rt.on(with_=host).spawn(NeedsGpu)
    assert await guest.visible() == "0,1"
    assert (await rt.info(guest)).gpus == (0, 1)
    assert (await rt.info(guest)).pid == await host.pid()
    assert (await free(rt))["gpus"] == 2
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="shares its GPUs: ask for none"):
        await rt.on(with_=host, gpus=1).spawn(Probe)
    members = await rt.on(with_=guest).group(2, Probe)
    assert await members.all(Probe.pid) == [await host.pid()] * 2
    await rt.stop(host)
    assert await guest.visible() == "0,1"
    await rt.stop(members)
    await rt.stop(guest)
    assert (await free(rt))["gpus"] == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_gpus_stay_taken_while_a_neighbour_lives_on_them(rt: aiodaft.Runtime) -> None:
    host = await rt.on(gpus=4).spawn(Probe)
    guest = await rt.on(with_=host).spawn(Probe)
    await rt.stop(host)
    assert await guest.environ("CUDA_VISIBLE_DEVICES") == "0,1,2,3"
    with pytest.raises(aiodaft.exceptions.InsufficientResources):
        await rt.spawn(NeedsGpu)
    await rt.stop(guest)
    assert await (await rt.spawn(NeedsGpu)).visible() == "0"


@pytest.mark.asyncio(loop_scope="module")
async def test_neighbours_die_together_and_the_dead_have_none(rt: aiodaft.Runtime) -> None:
    host = await rt.spawn(Probe)
    guest = await rt.on(with_=host, cpus=1).spawn(Probe)
    await rt.kill(guest)
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await host.pid()
    with pytest.raises(aiodaft.ActorDied, match="was to live with an actor that is gone") as caught:
        await rt.on(with_=host).spawn(Probe)
    assert caught.value.executed is False
    assert await resources_of(rt) == ((await resources_of(rt))[0],) * 2
    with pytest.raises(TypeError, match="expected an actor's handle, got str"):
        await rt.on(with_="host").spawn(Probe)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("padding", [0, 1_000_000], ids=["small", "large"])
async def test_neighbours_pass_the_object_itself(rt: aiodaft.Runtime, padding: int) -> None:
    host = await rt.spawn(Probe)
    guest = await rt.on(with_=host).spawn(Probe)
    assert await guest.same_as_others(host, padding)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_is_named_or_refused(rt: aiodaft.Runtime) -> None:
    name = controller_of(rt).options.process.node
    assert await (await rt.on(node=name).spawn(Echo)).echo(1) == 1
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match=f"there is no node 'mars'; there is {name}"):
        await rt.on(node="mars").spawn(Echo)


async def test_without_forking_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODAFT_TEST_MARK", "inherited")
    async with aiodaft.Runtime(preload=(), gpus=2, fork=False) as rt:
        probe, other = await rt.on(gpus=1).spawn(Probe), await rt.on(gpus=1).spawn(Probe)
        assert await probe.environ("CUDA_VISIBLE_DEVICES") == "0"
        assert await probe.environ("AIODAFT_TEST_MARK") == "inherited"
        assert await probe.call(other, {"through": [1]}) == {"through": [1]}
        with pytest.raises(ValueError, match="no weights"):
            await rt.spawn(SlowStart, 0.0, "no weights")
        await rt.kill(other)
        assert await probe.echo(1) == 1
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        probe.pid()


async def test_preloaded_modules_are_there_and_wrong_ones_harm_nothing() -> None:
    async with aiodaft.Runtime(preload=("colorsys", "there_is_no_such_module")) as rt:
        assert await (await rt.spawn(Probe)).has_module("colorsys")
    async with aiodaft.Runtime(preload=()) as rt:
        assert not await (await rt.spawn(Probe)).has_module("colorsys")


async def test_no_worker_is_forked_from_a_process_in_which_a_module_has_initialised_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = fake_cuda(tmp_path)
    if library is None:
        pytest.skip("there is no compiler of C")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "asks.py").write_text("import os; ASKS_THE_DRIVER = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']")
    (tmp_path / "early.py").write_text(f"import ctypes; ctypes.CDLL({str(library)!r}).cuInit(0)")
    async with aiodaft.Runtime(preload=("asks", "early", "colorsys"), gpus=1) as rt:
        probe, other = await rt.on(gpus=1).spawn(Probe), await rt.spawn(Probe)
        for module in ("asks", "early", "colorsys"):
            assert not await probe.has_module(module)
            assert not await other.has_module(module)
        assert await probe.environ("CUDA_VISIBLE_DEVICES") == "0"
        assert await probe.environ("PYTORCH_NVML_BASED_CUDA_CHECK") is None
        assert await probe.call(other, [1]) == [1]
    (warning,) = [record.message for record in caplog.records if "CUDA" in record.message]
    assert "the import of early initialises CUDA" in warning
    async with aiodaft.Runtime(preload=("asks",)) as rt:
        assert await (await rt.spawn(Probe)).has_module("asks")
    assert len([record for record in caplog.records if "CUDA" in record.message]) == 1


@pytest.mark.parametrize(("uvloop", "module"), [(True, "uvloop"), (False, "asyncio")])
async def test_workers_run_on_the_loop_that_was_asked_for(uvloop: bool, module: str) -> None:
    async with aiodaft.Runtime(preload=(), uvloop=uvloop) as rt:
        assert await (await rt.spawn(Probe)).loop_module() == module


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_do_not_share_their_environment(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Probe), await rt.spawn(Probe)
    await first.set_environ("AIODAFT_TEST_MARK", "mine")
    assert await first.environ("AIODAFT_TEST_MARK") == "mine"
    assert await second.environ("AIODAFT_TEST_MARK") is None
    assert await (await rt.spawn(Probe)).environ("AIODAFT_TEST_MARK") is None
