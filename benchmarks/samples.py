"""Samples, and whether other processes disturbed them."""

import statistics
from typing import Any

from benchmarks.others import Use

MAX_OTHER_CORES = 0.1
"""Cores that other processes may use during an undisturbed sample."""


def sample(value: float, use: Use) -> dict[str, Any]:
    """Return a figure with the numbers of cores used by others and by us."""
    other_cores = use.other_cores
    return {
        "value": value,
        "other_cores": round(other_cores, 3),
        "own_cores": round(use.own_cores, 3),
        "is_quiet": other_cores <= MAX_OTHER_CORES,
    }


def median_of(samples: list[dict[str, Any]], name: str) -> float:
    """Return the median of a figure over the undisturbed samples, or over all if there are none."""
    quiet = [float(one[name]) for one in samples if one["is_quiet"]]
    return statistics.median(quiet or [float(one[name]) for one in samples])


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over the undisturbed samples, or a marked one over all if there are none, and all samples."""
    num_quiet = sum(one["is_quiet"] for one in samples)
    return {
        "median": median_of(samples, "value"),
        "is_quiet": num_quiet > 0,
        "num_dropped": len(samples) - num_quiet if num_quiet else 0,
        "samples": samples,
    }
