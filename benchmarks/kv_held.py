"""How long a thread of the same process is held up while blocks are moved: the step loop must not notice it.

The thread does what a step does, small torch operations that let Python's lock go and want it back. On a machine
whose cores are all busy the scheduler's own delays are in every figure; those without a copy are printed beside.

Who lets the lock go for a moment only gets it back before a thread that waits has woken up, and that one waits on: it is
sure of the lock only when it has asked for it, which it does after the interpreter's switch interval (5 ms as shipped) of
waiting undisturbed. So there is a second figure, with an interval that is shorter than the copy of a piece takes.
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
    """Microseconds per operation (median, 99th percentile, longest), alone and while ``way`` goes on and on."""
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
    states, weights = torch.ones(1, 192), torch.ones(192, 192)
    gaps, last = [], time.perf_counter()
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
