"""An actor that takes part in pipelines and writes down what it did."""

import aiodaft


class Rank(aiodaft.Actor):
    """Values are tuples of what they went through, so that any wrong turn shows."""

    def __init__(self, last: int, failing: tuple[int, int, str] | None = None) -> None:
        self.last = last
        self.failing = failing
        self.did: list[tuple[int, int, str]] = []
        self.finished = 0
        self.batch: list[str] | None = None

    @aiodaft.method
    def start(self, batch: list[str] | None) -> None:
        self.batch = batch
        self.did = []

    @aiodaft.method
    def forward(self, stage: int, microbatch: int, x: tuple[str, ...] | None) -> tuple[str, ...] | None:
        self._note(stage, microbatch, "F")
        if x is None:
            assert stage == 0
            assert self.batch is not None
            x = (self.batch[microbatch],)
        assert x == (x[0], *(f"F{before}" for before in range(stage)))
        return None if stage == self.last else (*x, f"F{stage}")

    @aiodaft.method
    def backward(self, stage: int, microbatch: int, gradient: tuple[str, ...] | None) -> tuple[str, ...] | None:
        self._note(stage, microbatch, "B")
        assert (gradient is None) == (stage == self.last)
        assert gradient in (None, tuple(f"B{above}" for above in range(self.last, stage, -1)))
        return (*(gradient or ()), f"B{stage}") if stage else None

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
