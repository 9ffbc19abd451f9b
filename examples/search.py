"""Searches hyperparameters with optuna: trials run in parallel, and end early if they do not look good.

pip install optuna
python examples/search.py --trials 40 --workers 4
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

import numpy as np
import optuna
from optuna.trial import TrialState

import aiodaft

EPOCHS = 100


class Trainer(aiodaft.Actor):
    """Fits a line to noisy points by gradient descent."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.x = random.normal(size=(256, 8))
        self.y = self.x @ random.normal(size=8) + 0.1 * random.normal(size=256)
        self.epochs = 0

    @aiodaft.method
    def train(self, rate: float, momentum: float) -> Iterator[float]:
        """The loss after each epoch; the training ends with the loop that takes them."""
        weights, speed = np.zeros(8), np.zeros(8)
        for _ in range(EPOCHS):
            self.epochs += 1
            error = self.x @ weights - self.y
            speed = momentum * speed - rate * (self.x.T @ error) / len(error)
            weights += speed
            yield float((error**2).mean())

    @aiodaft.method
    def count(self) -> int:
        """The epochs that it has trained in all."""
        return self.epochs


async def run(study: optuna.Study, trainer: Trainer) -> None:
    """One trial."""
    trial = study.ask()
    rate, momentum = trial.suggest_float("rate", 1e-4, 2.0, log=True), trial.suggest_float("momentum", 0.0, 0.95)
    loss, epoch = float("inf"), 0
    async for loss in trainer.train(rate, momentum):
        trial.report(loss, epoch)
        epoch += 1
        if trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return
    study.tell(trial, loss)


async def main(trials: int, workers: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    left = iter(range(trials))

    async def work(trainer: Trainer) -> None:
        for _ in left:
            await run(study, trainer)

    async with aiodaft.Runtime(preload=("numpy",)) as rt, rt.group(workers, Trainer) as trainers:
        await asyncio.gather(*map(work, trainers))
        epochs = sum(await trainers.all(Trainer.count))
    stopped = len(study.get_trials(states=[TrialState.PRUNED]))
    print(f"{trials} trials by {workers} workers, {stopped} ended early: {epochs} epochs instead of {EPOCHS * trials}")
    print(f"the least loss is {study.best_value:.4f}, with {study.best_params}")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--trials", type=int, default=40)
    options.add_argument("--workers", type=int, default=2)
    aiodaft.run(main(**vars(options.parse_args())))
