"""Quantiles for reports."""

from collections.abc import Sequence


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the number of values, their median, 99th percentile and maximum."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "p50": round(ordered[last // 2], 4),
        "p99": round(ordered[round(0.99 * last)], 4),
        "max": round(ordered[-1], 4),
    }
