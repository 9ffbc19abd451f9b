"""The picture of a run of `rl_grpo.py`: the reward of each step, and the busy actors of its last fifth."""

import math
from pathlib import Path

Spans = list[tuple[float, float]]


def draw(path: str, curve: list[float], spans: dict[str, Spans], began: float) -> None:
    """Write the picture, in the format of the file's suffix.

    Args:
        path: The file.
        curve: The mean reward of each step.
        spans: When each worker was busy, in seconds on one clock.
        began: The beginning of the run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rcParams  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.fonttype"] = "none"  # text stays text: a small file
    figure = Figure(figsize=(10, 6), layout="constrained")
    reward, busy = figure.subplots(2, 1, height_ratios=(1, 1.4))
    reward.plot(range(1, len(curve) + 1), curve)
    reward.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    for row, worker in enumerate(spans):
        # One path for all bars: a smaller file than with a shape for each.
        times = [second - began for span in spans[worker] for second in (*span, math.nan)]
        busy.plot(times, [row] * len(times), linewidth=20, solid_capstyle="butt")
    end = max(ended for times in spans.values() for _, ended in times) - began
    busy.set(xlabel="seconds: the last fifth of the run", xlim=(0.8 * end, end), ylim=(-0.6, len(spans) - 0.4))
    busy.set(yticks=range(len(spans)), yticklabels=list(spans))
    busy.invert_yaxis()
    figure.savefig(Path(path))
