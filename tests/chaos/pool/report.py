"""The results of a run on a disturbed pool."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.chaos.held_resources import count, read_metrics
from tests.chaos.pool.answers import ACCEPTED, UNAVAILABLE, MixedAnswer, mistake_in
from tests.chaos.pool.moves import pauses_of_moves, results_of_moves
from tests.chaos.pool.pool import Pool
from tests.chaos.pool.quantiles import quantiles

_QUIET = "quiet"
_AFTER_SECONDS = 6.0
"""The time after an event in which pauses are looked for."""


@dataclass
class Stream:
    """The times of one streamed answer: from its first to its last event, and the pauses between, (start, length)."""

    begin: float
    end: float
    pauses: list[tuple[float, float]]

    @classmethod
    def of(cls, arrivals: Sequence[float]) -> "Stream":
        """Return the stream of these events, of which there is at least one."""
        pauses = [(a, b - a) for a, b in pairwise(arrivals)]
        return cls(arrivals[0], arrivals[-1], pauses)

    @property
    def gaps(self) -> list[float]:
        """The gaps between tokens, but for the first one: another worker computes the first token."""
        return [length for _, length in self.pauses[1:]]

    def longest_pause(self, begin: float, end: float) -> float:
        """Return the longest pause that overlaps an interval."""
        return max((length for at, length in self.pauses if at < end and at + length > begin), default=0.0)


@dataclass
class PoolReport:
    """The answers, the events and what was left. ``wrong``, ``failed`` and ``leaks`` must be empty.

    num_lost_with_router: answers that ended because their router was killed. num_refused: requests that a
    new router did not accept, since its workers had not come back.
    """

    num_whole: Counter[str] = field(default_factory=Counter)
    num_by_way: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_duplicated: int = 0
    num_missing: int = 0
    num_lost_with_router: int = 0
    num_refused: int = 0
    num_replays: float = 0
    num_local_recomputes: float = 0
    num_moves: Counter[str] = field(default_factory=Counter)
    move_pauses: dict[str, Any] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    pauses: dict[str, dict[str, float]] = field(default_factory=dict)
    exit_seconds: list[float] = field(default_factory=list)

    def take(
        self, answer: MixedAnswer, reference: MixedAnswer, *, router_died: bool, router_is_new: bool = False
    ) -> None:
        """Compare one answer with its reference.

        router_died: its router was killed meanwhile. router_is_new: it was started a moment ago, and may refuse requests.
        """
        if wrong := mistake_in(answer, reference):
            self.wrong.append(wrong)
            self.num_duplicated += ": duplicated" in wrong
            self.num_missing += ": missing" in wrong
        elif answer.is_whole:
            self.num_whole[answer.question.kind.value] += 1
            self.num_by_way[answer.way.value] += 1
            self.num_tokens += sum(len(choice.token_ids) for choice in answer.choices)
        elif router_died:
            self.num_lost_with_router += 1
        elif answer.status == UNAVAILABLE and router_is_new:
            self.num_refused += 1
        else:
            what = f"{answer.question.kind} ({answer.way})"
            status = "" if answer.status == ACCEPTED else f" (status {answer.status})"
            self.failed.append(f"question {answer.question.number}, {what}{status}: {answer.error}")

    async def count_replays(self, pool: Pool, streams: Sequence[Stream]) -> None:
        """Read the counts of replays and moves, and the pauses of moves, of all routers since the pool's start.

        streams: all that were answered, which show how long steps took.
        """
        metrics = [await read_metrics(pool.fleet.facts[router]["admin"]) for router in pool.routers]
        metrics += pool.last_metrics
        self.num_replays = count(metrics, "kvbaton_request_replays_total")
        self.num_local_recomputes = count(metrics, "kvbaton_request_local_recomputes_total")
        self.num_moves = results_of_moves(metrics)
        for router in pool.routers:
            await pool.move_log.read(router, pool.fleet.facts[router]["admin"])
        gaps = [gap for stream in streams for gap in stream.gaps]
        self.move_pauses = pauses_of_moves(pool.move_log.moves, pool.faults, gaps)

    @property
    def is_clean(self) -> bool:
        """True if nothing was wrong, failed or left."""
        return not (self.wrong or self.failed or self.leaks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            **vars(self),
            "num_whole": dict(self.num_whole),
            "num_by_way": dict(self.num_by_way),
            "num_moves": dict(self.num_moves),
            "events": dict(self.events),
            "is_clean": self.is_clean,
        }


def pauses_of(
    streams: Sequence[Stream], events: Sequence[tuple[str, float]], quiet_from: float, quiet_seconds: float
) -> dict[str, dict[str, float]]:
    """Return for each kind of event the longest pauses of the streams that were open when it happened.

    events: kind and time. quiet_from, quiet_seconds: an interval without events. added_p99 is the 99th percentile without
    the median of the quiet interval.
    """
    found: dict[str, list[float]] = {}
    for kind, at in [(_QUIET, quiet_from), *events]:
        seconds = quiet_seconds if kind == _QUIET else _AFTER_SECONDS
        open_then = [each for each in streams if each.begin <= at < each.end]
        found.setdefault(kind, []).extend(each.longest_pause(at, at + seconds) for each in open_then)
    summaries = {kind: quantiles(lengths) for kind, lengths in found.items() if lengths}
    usual = summaries.get(_QUIET, {"p50": 0.0})["p50"]
    return {
        kind: {**each, "added_p99": round(max(0.0, each["p99"] - usual), 4)}
        for kind, each in summaries.items()
    }
