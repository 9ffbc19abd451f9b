"""The picture of a run of `rl_grpo.py`: the reward of each step, and who was busy when."""

from pathlib import Path

Spans = list[tuple[float, float]]


def draw(path: str, curve: list[float], spans: dict[str, Spans], began: float) -> None:
    """Write the picture, in the format of the file's suffix.

    Args:
        path: The file.
        curve: The mean reward of each step.
        spans: When each worker was busy, in seconds on one clock.
        began: When the run began.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(10, 6), layout="constrained")
    reward, busy = figure.subplots(2, 1, height_ratios=(1, 1.4))
    reward.plot(range(1, len(curve) + 1), curve)
    reward.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    for row, worker in enumerate(spans):
        bars = [(start - began, end - start) for start, end in spans[worker]]
        busy.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
    busy.set(xlabel="seconds", yticks=range(len(spans)), yticklabels=list(spans))
    busy.invert_yaxis()
    figure.savefig(Path(path))
