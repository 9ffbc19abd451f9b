"""Reinforcement learning: what must be true of each mode, in a few steps; whole runs are marked `soak`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rl_grpo import Learning, main, options_of, set_up
from rl_policy import Weights, log_probabilities, make_policy, of_tokens, weights_of
from rl_trainer import Trainer
from rl_workers import Generator, Reference
from run_example import EXAMPLES, run_example

import aiodaft

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


def log_probabilities_with(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    policy = make_policy("window", seed=0)
    policy.load_state_dict(weights)
    return of_tokens(log_probabilities(policy, tokens), tokens)


async def test_an_answer_that_is_interrupted_by_new_weights_keeps_its_tokens_and_goes_on_with_them() -> None:
    old, new = (weights_of(make_policy("window", seed)) for seed in (0, 1))
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
    trainer = Trainer("window", "grpo", seed=0, learning_rate=1e-2, staleness=1)
    trainer.version = VERSION
    trainer.check_staleness(torch.tensor([[2, 3], [3, 3]]))
    assert trainer.ages.oldest == 1
    assert trainer.ages.resumed == 1
    with pytest.raises(AssertionError, match=r"at version 3, tokens of versions \[1, 3\]"):
        trainer.check_staleness(torch.tensor([[3, 3], [1, 3]]))


async def learn(rt: aiodaft.Runtime, *options: str) -> Learning:
    """A run of a few steps, all synchronous."""
    chosen = options_of(list(options))
    learning = await set_up(rt, chosen)
    await learning.run(batches=1, staleness=0, steps=chosen.steps)
    return learning


@pytest.mark.timeout(60)
async def test_rewards_are_the_same_to_the_last_bit_wherever_the_generators_are() -> None:
    async with aiodaft.Runtime() as rt:
        apart = await learn(rt, "--place", "split", "--steps", "4")
        together = await learn(rt, "--place", "colocated", "--steps", "4")
        assert rt.traffic().payload == 0
        pids = [(await rt.info(worker)).pid for worker in (*together.trainers, *together.generators)]
    assert pids[:2] == pids[2:]
    assert apart.curve == together.curve
    assert len(set(apart.curve)) == 4


@pytest.mark.timeout(60)
async def test_a_sample_that_crashes_or_hangs_its_sandbox_is_dropped_and_no_other() -> None:
    async with aiodaft.Runtime() as rt:
        learning = await learn(rt, "--faults", "--steps", "1")
        restarts = [(await rt.info(sandbox)).restarts for sandbox in learning.sandboxes]
    assert sorted(learning.dropped) == [(3, 5), (6, 7)]
    # Each of the two ends its sandbox with its chunk, and once more when it is asked for alone.
    assert sum(restarts) == 4


@pytest.mark.timeout(60)
async def test_generators_run_ahead_of_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    await main(options_of(["--mode", "async", "--algo", "ppo", "--steps", "4"]))
    output = capsys.readouterr().out
    assert "ppo, async, split: mean reward" in output
    assert "after 4 steps" in output
    assert "the controller: 0 payload bytes" in output


async def test_a_model_of_transformers_answers_and_learns_as_the_other_one_does() -> None:
    pytest.importorskip("transformers")
    model = "LlamaForCausalLM"
    generator, reference = Generator(model, seed=0), Reference(model, seed=0)
    trainer = Trainer(model, "grpo", seed=0, learning_rate=3e-3, staleness=0)
    rollouts = await generator.rollout(chunk=0)
    rewards = [float(first == 3) for _, _, first, _ in rollouts.tokens.tolist()]
    expected = reference.log_probabilities(rollouts)
    before = trainer.loss(rollouts, torch.tensor(rewards), expected)
    gradient = trainer.gradient([(rollouts, rewards, expected)], len(rewards))
    assert trainer.step(gradient) == await generator.load(trainer.weights(), version=1)
    assert trainer.loss(rollouts, torch.tensor(rewards), expected) < before


def test_without_transformers_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"--model GPT2LMHeadModel needs transformers: pip install"):
        make_policy("GPT2LMHeadModel", seed=0)


def test_the_picture_of_a_run_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    # In a process of its own: matplotlib keeps the files of its fonts open.
    drawing = f"from rl_plot import draw; draw({str(picture)!r}, [0.1, 0.2], {{'Trainer-1': [(7.0, 7.5)]}}, 6.5)"
    subprocess.run([sys.executable, "-c", drawing], cwd=EXAMPLES, check=True)
    assert picture.read_text().startswith("<?xml")


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
