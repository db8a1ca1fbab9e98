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


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Median over the quiet samples, or, said so, over all where none was quiet; with all of them."""
    quiet = [one["value"] for one in samples if one["is_quiet"]]
    return {
        "median": statistics.median(quiet or [one["value"] for one in samples]),
        "is_quiet": bool(quiet),
        "num_dropped": len(samples) - len(quiet) if quiet else 0,
        "samples": samples,
    }
