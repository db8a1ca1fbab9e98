"""Measures the delay of another thread of the same process while blocks are moved, since it would slow the step loop.

The thread runs small torch operations like a step, which release and acquire the GIL. On a machine with busy cores every
figure includes the scheduler's delays; the figures without a copy are printed for comparison.

A thread that releases the GIL briefly gets it back before a waiting thread has woken up, so the waiting one continues to
wait: it is certain to get the GIL only after it has requested it, at the end of the interpreter's switch interval (5 ms by
default). Hence a second figure with an interval shorter than the copy of a piece.

"""

import statistics
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.kv_pools import Way

_SECONDS = 0.7
_SHORT_INTERVAL_SECONDS = 0.0002


def held_up(way: Way) -> dict[str, Any]:
    """Return microseconds per operation (median, 99th percentile, maximum), alone and while ``way`` runs repeatedly."""
    found = {"alone": _summary(_operate(_SECONDS)), "while copying": _summary(_beside(way))}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SHORT_INTERVAL_SECONDS)
    try:
        return found | {"while copying, short switch interval": _summary(_beside(way))}
    finally:
        sys.setswitchinterval(interval)


def _beside(way: Way) -> list[float]:
    is_over = threading.Event()

    def copy() -> None:
        while not is_over.is_set():
            way()

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        return _operate(_SECONDS)
    finally:
        is_over.set()
        copying.join()


def _operate(seconds: float) -> list[float]:
    states = torch.ones(1, 192)
    weights = torch.ones(192, 192)
    gaps = []
    last = time.perf_counter()
    end = last + seconds
    while last < end:
        torch.mm(states, weights)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


def _summary(gaps: list[float]) -> dict[str, float]:
    percentiles = statistics.quantiles(gaps if len(gaps) > 1 else gaps * 2, n=100)
    return {
        "median": round(percentiles[49] * 1e6, 1),
        "p99": round(percentiles[98] * 1e6, 1),
        "longest": round(max(gaps) * 1e6, 1),
        "operations_per_second": round(len(gaps) / sum(gaps)),
    }
