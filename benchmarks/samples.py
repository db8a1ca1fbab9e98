"""Samples, and whether other processes disturbed them."""

import statistics
from typing import Any

from benchmarks.others import Use

MAX_OTHER_CORES = 0.1
"""What others may keep busy during a sample that counts."""


def sample(value: float, use: Use) -> dict[str, Any]:
    """A figure with how many cores others, and ours, kept busy meanwhile."""
    other_cores = use.other_cores
    return {
        "value": value,
        "other_cores": round(other_cores, 3),
        "own_cores": round(use.own_cores, 3),
        "is_quiet": other_cores <= MAX_OTHER_CORES,
    }


def median_of(samples: list[dict[str, Any]], name: str) -> float:
    """Of this figure, over the quiet samples, or over all where none was quiet."""
    quiet = [float(one[name]) for one in samples if one["is_quiet"]]
    return statistics.median(quiet or [float(one[name]) for one in samples])


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Median over the quiet samples, or, said so, over all where none was quiet; with all of them."""
    num_quiet = sum(one["is_quiet"] for one in samples)
    return {
        "median": median_of(samples, "value"),
        "is_quiet": num_quiet > 0,
        "num_dropped": len(samples) - num_quiet if num_quiet else 0,
        "samples": samples,
    }
