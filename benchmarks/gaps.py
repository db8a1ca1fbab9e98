"""Statistics of a load's answers: gaps between tokens, stalls, times to first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.streams import Stream

_LARGEST = 50


@dataclass(frozen=True)
class Latency:
    """The latencies of one answer in seconds, for which goals are set."""

    ttft: float
    tpot: float


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return a percentile with linear interpolation; None without values."""
    return float(np.quantile(values, share)) if values else None


def of_chats(chats: Sequence[Stream], wall_seconds: float) -> dict[str, Any]:
    """Return milliseconds, and tokens per second of all chats. Stalls are gaps over 2 and 3 times the median."""
    gaps = [gap * 1000 for chat in chats for gap in chat.gaps]
    worst = [max(chat.gaps) * 1000 for chat in chats if chat.gaps]
    median = percentile(gaps, 0.5) or 0.0
    return {
        "num_chats": len(chats),
        "num_gaps": len(gaps),
        "tokens_per_second": sum(chat.num_tokens for chat in chats) / wall_seconds,
        "tokens_per_event": _ratio(
            sum(chat.num_tokens for chat in chats), sum(len(chat.arrivals) for chat in chats)
        ),
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "itl_p999": percentile(gaps, 0.999),
        "itl_max": max(gaps, default=None),
        "largest_gaps": sorted(gaps, reverse=True)[:_LARGEST],
        "worst_gap_per_chat_p50": percentile(worst, 0.5),
        "num_gaps_over_2x": sum(gap > 2 * median for gap in gaps),
        "num_gaps_over_3x": sum(gap > 3 * median for gap in gaps),
        "max_over_median": _ratio(max(gaps, default=0.0), median),
        "ttft_p50": percentile([chat.ttft * 1000 for chat in chats], 0.5),
        "tpot_p50": percentile([chat.tpot * 1000 for chat in chats], 0.5),
    }


def of_prompts(prompts: Sequence[Stream]) -> dict[str, Any]:
    """Return the milliseconds to the first token of the long prompts."""
    ttfts = [prompt.ttft * 1000 for prompt in prompts]
    return {
        "num_prompts": len(prompts),
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "ttft_samples": ttfts,
    }


def latencies(answers: Sequence[Stream]) -> list[Latency]:
    """Return the latencies of the answers, for the goodput map."""
    return [Latency(answer.ttft, answer.tpot) for answer in answers]


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None
