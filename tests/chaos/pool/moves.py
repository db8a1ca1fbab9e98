"""The figures of the moves in a run: the pauses that they cost, and what these may be."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from tests.chaos.held_resources import read_states
from tests.chaos.pool.faults import Faults
from tests.chaos.pool.quantiles import quantiles

Move = Mapping[str, Any]
"""A move that has succeeded, as a router's ``/debug/state`` shows it (``router/move_record.py``)."""
_RESULTS = re.compile(r'^kvbaton_migrations_total\{reason="\w+",result="(\w+)"\} ([\d.]+)$', re.M)
_SAMPLE_SECONDS = 1.0
_MIN_BOUND_SECONDS = 0.05
_STEPS = 3
_BOUND_OF_FAULTS_SECONDS = 3.0


class MoveLog:
    """Collects the moves of all routers: each one remembers only the last of its own."""

    def __init__(self) -> None:
        self._moves: dict[tuple[str, int, float], Move] = {}

    @property
    def moves(self) -> list[Move]:
        """All moves that were read."""
        return list(self._moves.values())

    async def read(self, router: str, admin: str) -> None:
        """Read the moves of one router."""
        for move in (await read_states([(router, admin)]))[router]["moves"]:
            self._moves[move["request_id"], move["choice"], move["ordered_at"]] = move

    async def keep_reading(self, admins: Mapping[str, str]) -> None:
        """Read the moves of these routers until the task is cancelled. admins: their addresses, which do not change."""
        while True:
            for router, admin in admins.items():
                with suppress(aiohttp.ClientError, ConnectionError):  # it is killed just now, or starts
                    await self.read(router, admin)
            await asyncio.sleep(_SAMPLE_SECONDS)  # the interval between samples


def results_of_moves(metrics: Sequence[str]) -> Counter[str]:
    """Return the number of moves by result. metrics: /metrics of the routers."""
    found: Counter[str] = Counter()
    for text in metrics:
        for result, number in _RESULTS.findall(text):
            found[result] += int(float(number))
    return found


def pauses_of_moves(moves: Sequence[Move], faults: Faults, gaps: Sequence[float]) -> dict[str, Any]:
    """Return the pauses of moves that a fault has met, of all others, and the bounds of both; empty without a move.

    A move that a fault has met at one of its ends is bounded like a kill. All others are bounded by three steps, at least
    50 ms, and the time in which KV crosses. A step is what the streams of the same run show: the 99th percentile of the
    pauses is compared with that of the gaps between tokens (gaps), less the usual gap.
    """
    if not moves or not gaps:
        return {}
    met = [move for move in moves if faults.have_met(move)]
    others = [move for move in moves if not faults.have_met(move)]
    gap = quantiles(gaps)
    found: dict[str, Any] = {"token_gap": gap}
    if met:
        pauses = quantiles([move["pause_seconds"] for move in met])
        is_within = pauses["p99"] <= _BOUND_OF_FAULTS_SECONDS
        found["met_by_a_fault"] = {**pauses, "bound": _BOUND_OF_FAULTS_SECONDS, "is_within_bound": is_within}
    if others:
        pauses = quantiles([move["pause_seconds"] for move in others])
        transfer = quantiles([move["copying_seconds"] for move in others])["p99"]
        added = round(pauses["p99"] - gap["p50"], 4)
        bound = _bound(gap["p99"], transfer)
        found["others"] = {
            **pauses,
            "added_p99": added,
            "num_steps": quantiles([move["num_steps"] for move in others]),
            "transfer_p99": transfer,
            "bound": bound,
            "is_within_bound": added <= bound,
            "bound_with_the_usual_gap": _bound(gap["p50"], transfer),
        }
    return found


def _bound(step: float, transfer: float) -> float:
    return round(max(_STEPS * step, _MIN_BOUND_SECONDS) + transfer, 4)
