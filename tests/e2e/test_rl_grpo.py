"""Reinforcement learning: the truths of each mode, in a few steps; whole runs are marked `soak`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rl_grpo import CHUNKS, MODES, Learning, options_of, set_up
from rl_policy import Weights, digest, log_probabilities, make_policy, of_tokens, weights_of
from rl_trainer import Ages, Trainer, learned
from rl_workers import Generator, Reference
from run_example import run_example
from sharded import resharding

import aiodaft

pytestmark = pytest.mark.programs

VERSION = 3


class PausedGenerator(Generator):
    """Waits before the second token until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("window", seed=0)
        self.paused, self.resumed = asyncio.Event(), asyncio.Event()

    async def before_next_token(self, chunk: int) -> None:
        self.paused.set()
        await self.resumed.wait()

    @aiodaft.method
    async def wait_paused(self) -> None:
        await self.paused.wait()

    @aiodaft.method
    async def resume(self) -> None:
        self.resumed.set()


class MortalGenerator(Generator):
    """May be killed in the middle of a move."""

    @aiodaft.method
    async def end_in_move(self) -> None:
        setattr(resharding(), "allocate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010 - of this object

    @aiodaft.method
    async def state(self) -> tuple[int, int]:
        """The version, and the digest of its weights."""
        return self.current[0], digest(weights_of(self.current[1]))


def log_probabilities_with(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    parts = learned("window", "grpo", seed=0)
    parts.load_state_dict(weights)
    return of_tokens(log_probabilities(parts["policy"], tokens), tokens)


async def test_an_answer_that_is_interrupted_by_new_weights_keeps_its_tokens_and_goes_on_with_them() -> None:
    old, new = (weights_of(learned("window", "grpo", seed)) for seed in (0, 1))
    async with aiodaft.Runtime() as rt, rt.spawn(PausedGenerator) as generator:
        answering = generator.rollout(5)
        await generator.wait_paused()
        await generator.load(new, VERSION)
        await generator.resume()
        rollouts = await answering
    assert rollouts.versions.unique(dim=0).tolist() == [[0, VERSION]]
    undisturbed = await Generator("window", seed=0).rollout(5)
    assert torch.equal(rollouts.tokens[:, :3], undisturbed.tokens[:, :3])
    assert not torch.equal(rollouts.tokens[:, 3], undisturbed.tokens[:, 3])
    for place, weights in enumerate((old, new)):
        expected = log_probabilities_with(weights, rollouts.tokens)
        torch.testing.assert_close(rollouts.logps[:, place], expected[:, place].detach())


def test_a_trainer_refuses_a_single_token_that_is_too_old() -> None:
    ages = Ages(allowed=1)
    ages.check(torch.tensor([[2, 3], [3, 3]]), now=VERSION)
    assert (ages.oldest, ages.resumed) == (1, 1)
    with pytest.raises(AssertionError, match=r"at version 3, tokens of versions \[1, 3\]"):
        ages.check(torch.tensor([[3, 3], [1, 3]]), now=VERSION)


async def learn(rt: aiodaft.Runtime, *options: str) -> Learning:
    """A run of a few steps, all synchronous."""
    chosen = options_of(list(options))
    learning = await set_up(rt, chosen)
    await learning.run(batches=1, staleness=0, steps=chosen.steps)
    return learning


@pytest.mark.timeout(120)
async def test_rewards_are_the_same_to_the_last_bit_wherever_the_generators_are() -> None:
    async with aiodaft.Runtime() as rt:
        apart = await learn(rt, "--place", "split", "--steps", "4")
        together = await learn(rt, "--place", "colocated", "--steps", "4")
        assert rt.traffic().payload == 0
        pids = [(await rt.info(worker)).pid for worker in (*together.trainers, *together.generators)]
    assert pids[:2] == pids[2:]
    assert len(apart.generators) == 3
    assert apart.curve == together.curve
    assert len(set(apart.curve)) == 4


@pytest.mark.timeout(120)
async def test_a_generator_that_is_killed_in_the_move_of_weights_holds_up_no_other_and_comes_back_with_them() -> None:
    async with aiodaft.Runtime() as rt:
        undisturbed = await learn(rt, "--steps", "3")
        learning = await set_up(rt, options_of(["--steps", "3"]), MortalGenerator)
        whole = sum(one.nbytes for one in weights_of(learned("window", "grpo", seed=0)).values())
        # The fewest bytes: all weights to each generator, the other half of them to each trainer.
        assert learning.sync.bytes == 3 * whole + whole
        second = cast("MortalGenerator", learning.generators[1])
        await second.end_in_move()
        await learning.run(batches=1, staleness=0, steps=3)
        states = await learning.generators.all(MortalGenerator.state)
        restarts = [(await rt.info(one)).restarts for one in learning.generators]
        assert rt.traffic().payload == 0
    assert restarts == [0, 1, 0]
    assert learning.curve == undisturbed.curve
    assert len({*states}) == 1
    assert states[0][0] == 3


@pytest.mark.timeout(120)
async def test_a_sample_that_crashes_or_hangs_its_sandbox_is_dropped_and_no_other() -> None:
    async with aiodaft.Runtime() as rt:
        learning = await learn(rt, "--faults", "--steps", "1")
        restarts = [(await rt.info(sandbox)).restarts for sandbox in learning.sandboxes]
    assert sorted(learning.dropped) == [(3, 5), (6, 7)]
    # Each of the two ends its sandbox with its chunk, and once more when it is asked for alone.
    assert sum(restarts) == 4


class Rehearsal(Learning):
    """The order in which batches are made of chunks, which are ready when a test says so."""

    def __init__(self) -> None:
        self.version, self.curve = 0, list[float]()
        self.begun = list[asyncio.Future[Any]]()
        self.learned = asyncio.Queue[list[int]]()

    async def experience(self, chunk: int) -> Any:
        self.begun.append(asyncio.get_running_loop().create_future())
        return await self.begun[chunk]

    async def learn(self, batch: list[Any]) -> None:
        self.version += 1
        self.curve.append(0.0)
        self.learned.put_nowait(batch)


async def until_begun(learning: Rehearsal, count: int) -> None:
    while len(learning.begun) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("mode", "ready", "learned"),
    [
        # No chunk begins before all of the batch are learned from.
        ("sync", [[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        # Chunks are as old as they may be after one batch: those of the beginning are in the second one.
        (
            "onestep",
            [[2, 3, 4, 5, 6, 7, 8, 9], [16, 17, 18, 19, 20, 21, 22, 23], [0, 1, 10, 11, 12, 13, 14, 15]],
            [[2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 10, 11, 12, 13, 14, 15]],
        ),
        # Two slow chunks hold up none of the first two batches.
        (
            "async",
            [[2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17]],
            [[2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17]],
        ),
    ],
)
async def test_a_batch_has_the_chunks_that_are_ready_and_all_that_would_be_too_old_for_the_next_one(
    mode: str, ready: list[list[int]], learned: list[list[int]]
) -> None:
    batches, staleness = MODES[mode]
    learning = Rehearsal()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(learning.run(batches, staleness, steps=9))
        for turn, chunks in enumerate(ready):
            # As many are under way as the mode says, and no more.
            await until_begun(learning, CHUNKS * (batches + min(turn, 1)))
            assert len(learning.begun) == CHUNKS * (batches + min(turn, 1))
            for chunk in chunks:
                learning.begun[chunk].set_result(chunk)
        assert [await learning.learned.get() for _ in learned] == learned
        run.cancel()


@pytest.mark.timeout(120)
def test_the_whole_program_learns_asynchronously_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    output = run_example("rl_grpo.py", "--mode", "async", "--algo", "ppo", "--steps", "4", "--plot", str(picture))
    assert "ppo, async, split: mean reward" in output
    assert "after 4 steps" in output
    assert "the controller: 0 payload bytes" in output
    assert all(f"{worker}-1" in picture.read_text() for worker in ("Trainer", "Generator", "Sandbox", "Reference"))


async def test_a_model_of_transformers_answers_and_learns_as_the_other_one_does() -> None:
    pytest.importorskip("transformers")
    model = "LlamaForCausalLM"
    generator, reference = Generator(model, seed=0), Reference(model, seed=0)
    rollouts = await generator.rollout(chunk=0)
    rewards = [float(first == 3) for _, _, first, _ in rollouts.tokens.tolist()]

    def chance() -> torch.Tensor:
        found = of_tokens(log_probabilities(generator.current[1]["policy"], rollouts.tokens), rollouts.tokens)
        return found[torch.tensor(rewards).bool()].mean()

    before = chance()
    async with aiodaft.Runtime() as rt, rt.group(1, Trainer, model, "grpo", 0, 3e-3, 0) as trainers:
        gradient = trainers[0].gradient([(rollouts, rewards, reference.log_probabilities(rollouts))], len(rewards))
        assert await trainers[0].step(gradient) == await generator.load(await trainers[0].shard(), version=1)
    assert chance() > before
    # By default, this class would have more heads of keys than of queries.
    assert log_probabilities(make_policy("Qwen2ForCausalLM", seed=0), rollouts.tokens).isfinite().all()


def test_without_transformers_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"--model GPT2LMHeadModel needs transformers: pip install"):
        make_policy("GPT2LMHeadModel", seed=0)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("mode", ["sync", "onestep", "async"])
def test_the_mean_reward_reaches_the_target_within_150_steps(mode: str, algorithm: str, seed: int) -> None:
    tail = () if mode == "sync" else ("--tail", "0.1")
    options = ("--mode", mode, "--algo", algorithm, "--seed", str(seed), *tail)
    output = run_example("rl_grpo.py", *options, "--place", "colocated" if seed % 2 else "split")
    assert "the controller: 0 payload bytes" in output
    reward, steps = output.partition("mean reward ")[2].split(" steps")[0].split(" after ")
    assert float(reward) >= 0.9
    assert int(steps) <= 150


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_trainers_wait_less_when_slow_chunks_do_not_hold_them_up() -> None:
    options = ("--steps", "40", "--tail", "0.2")
    outputs = [run_example("rl_grpo.py", "--mode", mode, *options) for mode in ("sync", "async")]
    synchronous, asynchronous = [
        int(output.partition("a trainer is busy for ")[2].partition("%")[0]) for output in outputs
    ]
    assert asynchronous > synchronous
