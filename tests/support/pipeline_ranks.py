"""An actor that takes part in pipelines and writes down its tasks."""

import aiodaft
from aiodaft.pipeline import Schedule
from aiodaft.pipeline.schedule import paths_of

# The stages that a micro-batch goes through, and the tasks that it went through.
Value = tuple[list[int], list[str]]


def batch_of(schedule: Schedule) -> list[list[int]]:
    """A batch for `Rank`: for each micro-batch, the stages that it goes through."""
    return [path for _, path in sorted(paths_of(schedule).items())]


class Rank(aiodaft.Actor):
    """Values are lists of the steps that they went through, so that any wrong turn shows."""

    def __init__(self, last: int, failing: tuple[int, int, str] | None = None) -> None:
        self.last = last
        self.failing = failing
        self.did: list[tuple[int, int, str]] = []
        self.finished = 0
        self.batch: list[list[int]] | None = None
        self.paths: dict[tuple[int, int], list[int]] = {}

    @aiodaft.method
    def start(self, batch: list[list[int]] | None) -> None:
        self.batch = batch
        self.did = []

    @aiodaft.method
    def forward(self, stage: int, microbatch: int, x: Value | None) -> Value | None:
        self._note(stage, microbatch, "F")
        if x is None:
            assert stage == 0
            assert self.batch is not None
            x = (self.batch[microbatch], [])
        path, done = x
        assert done == [f"F{before}" for before in path[: path.index(stage)]]
        self.paths[stage, microbatch] = path
        return None if stage == self.last else (path, [*done, f"F{stage}"])

    @aiodaft.method
    def backward(self, stage: int, microbatch: int, gradient: list[str] | None) -> list[str] | None:
        self._note(stage, microbatch, "B")
        assert (gradient is None) == (stage == self.last)
        path = self.paths.pop((stage, microbatch))
        assert (gradient or []) == [f"B{above}" for above in path[: path.index(stage) : -1]]
        return [*(gradient or []), f"B{stage}"] if stage else None

    @aiodaft.method
    def weights(self, stage: int, microbatch: int) -> None:
        self._note(stage, microbatch, "W")

    @aiodaft.method
    def finish(self, done: list[None]) -> list[tuple[int, int, str]]:
        assert set(done) == {None}
        self.finished += 1
        return self.did

    @aiodaft.method
    def times_finished(self) -> int:
        return self.finished

    def _note(self, stage: int, microbatch: int, kind: str) -> None:
        self.did.append((stage, microbatch, kind))
        if self.failing == (stage, microbatch, kind):
            raise ArithmeticError(f"{kind} of stage {stage} fails")
