"""The picture of ``benchmarks.autoscale_demo``: the load, and the workers that serve, are desired, and are simulated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_RATE_SECONDS = 10


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the figures of a run. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    samples = figures["samples"]
    times = samples["time"]
    figure, axes = plt.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    rates = rate_of(samples["arrivals"], times[-1])
    axes[0].step(range(0, _RATE_SECONDS * len(rates), _RATE_SECONDS), rates, where="post", color="black")
    axes[0].set(ylabel="requests per second", ylim=(0, 1.15 * max(rates)))
    for axis, role in zip(axes[1:], ("prefill", "decode"), strict=True):
        axis.step(times, samples[role]["desired"], where="post", color="tab:orange", label="desired")
        axis.step(times, samples[role]["serving"], where="post", color="tab:blue", label="serving")
        changes = [*figures["simulated"]["scaled"]["desired"][role], (times[-1], None)]
        numbers = [number for _, number in changes[:-1]]
        axis.step(
            [time for time, _ in changes],
            [*numbers, numbers[-1]],
            where="post",
            color="black",
            linestyle=":",
            label="simulated",
        )
        axis.set(ylabel=f"{role} workers", ylim=(0, 2.8), yticks=(0, 1, 2))
        axis.legend(loc="upper left", ncols=3)
    begin = 0.0
    for number, phase in enumerate(figures["phases"]):
        for axis in axes:
            axis.axvline(begin, color="0.8", zorder=0)
        height = axes[0].get_ylim()[1] * (1.0 - 0.07 * (number % 2))
        axes[0].text(begin, height, f" {phase['name']}", fontsize=8, va="top")
        begin += phase["seconds"]
    axes[-1].set(xlabel="seconds")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def rate_of(arrivals: Sequence[float], end: float) -> list[float]:
    """Return the requests per second within every ten seconds up to ``end``."""
    counts = [0] * (int(end // _RATE_SECONDS) + 1)
    for time in arrivals:
        counts[min(int(time // _RATE_SECONDS), len(counts) - 1)] += 1
    return [count / _RATE_SECONDS for count in counts]
