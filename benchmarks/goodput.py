"""Goodput over goals: the highest rate of long prompts at which nine of ten requests meet both goals (after DistServe)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.gaps import Latency
from benchmarks.load import Outcome

SHARE = 0.9
Map = list[list[float | None]]
"""By TTFT goal, then by TPOT goal: long prompts per second; None if the chats alone do not meet the goals."""


def goodput(outcomes: Sequence[Outcome], ttft: float, tpot: float) -> float | None:
    """Return the goodput for goals in seconds, which chats and long prompts must each meet; no requests meet them too."""
    met = [
        one.rate
        for one in outcomes
        if _share_met(one.chats, ttft, tpot) >= SHARE and _share_met(one.prompts, ttft, tpot) >= SHARE
    ]
    return max(met, default=None)


def goals(values: Sequence[float], count: int = 24) -> list[float]:
    """Return goals from below the median to above the maximum of the values, in equal ratios."""
    return [float(goal) for goal in np.geomspace(0.5 * np.median(values), 1.25 * max(values), count)]


def goodput_map(outcomes: Sequence[Outcome], ttfts: Sequence[float], tpots: Sequence[float]) -> Map:
    """Return the goodput at every pair of goals."""
    return [[goodput(outcomes, ttft, tpot) for tpot in tpots] for ttft in ttfts]


def all_maps(runs: Mapping[str, Sequence[Outcome]]) -> tuple[dict[str, Map], list[float], list[float]]:
    """Return the map of each configuration, and the common TTFT and TPOT goals."""
    answers = [answer for outcomes in runs.values() for one in outcomes for answer in one.chats + one.prompts]
    ttfts = goals([answer.ttft for answer in answers])
    tpots = goals([max(answer.tpot, 0.001) for answer in answers])
    return {name: goodput_map(outcomes, ttfts, tpots) for name, outcomes in runs.items()}, ttfts, tpots


def difference(ours: Map, others: Sequence[Map], step: float) -> Map:
    """Return ours minus the best of the others; if one of them meets the goals with chats only, it counts as ``step``.

    Goals that no configuration meets stay None.
    """

    def cell(*rates: float | None) -> float | None:
        if all(rate is None for rate in rates):
            return None
        own, *best = (-step if rate is None else rate for rate in rates)
        return own - max(best, default=-step)

    return [[cell(*rates) for rates in zip(*rows, strict=True)] for rows in zip(ours, *others, strict=True)]


def draw(
    maps: Mapping[str, Map], ttfts: Sequence[float], tpots: Sequence[float], ours: str, path: Path
) -> None:
    """Draw one map per configuration, and one where ``ours`` wins (blue) or loses (red). Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    rates = [rate for found in maps.values() for row in found for rate in row if rate] or [1.0]
    highest = max(rates)
    gain = difference(maps[ours], [found for name, found in maps.items() if name != ours], min(rates))
    panels = [(name, found, "viridis", 0.0) for name, found in maps.items()]
    panels.append((f"{ours}: more (blue) or less (red)", gain, "RdBu", -highest))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6 * columns, 4.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, found, colours, low) in zip(axes.flat, panels, strict=False):
        cells = np.array([[np.nan if rate is None else rate for rate in row] for row in found])
        axis.set_facecolor("0.85")
        mesh = axis.pcolormesh(
            [1000 * goal for goal in tpots],
            ttfts,
            cells,
            cmap=colours,
            vmin=low,
            vmax=highest,
            shading="nearest",
        )
        axis.set(title=title, xscale="log", yscale="log", xlabel="TPOT goal, ms", ylabel="TTFT goal, s")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            scale.set_major_formatter(StrMethodFormatter("{x:g}"))
            scale.set_minor_formatter(NullFormatter())
        figure.colorbar(mesh, ax=axis, label="long prompts per second")
    figure.suptitle(
        f"Highest rate at which {SHARE:.0%} of chats and of long prompts meet both goals (grey: none)"
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _share_met(answers: Sequence[Latency], ttft: float, tpot: float) -> float:
    if not answers:
        return 1.0
    return sum(answer.ttft <= ttft and answer.tpot <= tpot for answer in answers) / len(answers)
