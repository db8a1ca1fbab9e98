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
from tests.chaos.pool.transfers import transfer_seconds

Move = Mapping[str, Any]
"""A move that has succeeded, as a router's ``/debug/state`` shows it (``router/telemetry/migration_record.py``)."""
_RESULTS = re.compile(r'^kvbaton_migrations_total\{reason="\w+",result="(\w+)"\} ([\d.]+)$', re.M)
_SAMPLE_SECONDS = 1.0
_MIN_BOUND_SECONDS = 0.05
_STEPS = 3
_BOUND_OF_FAULTS_SECONDS = 3.0
_TOGETHER_SECONDS = 0.5
"""The longest time between two moves of one group."""
_NUM_SLOWEST = 5


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
    50 ms, and the time in which KV crosses (``transfers.py``). A step is what the streams of the same run show: the 99th
    percentile of the pauses is compared with that of the gaps between tokens (gaps), less the usual gap.
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
        transfer = quantiles(transfer_seconds(others))["p99"]
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
            **_slowest_groups(others),
        }
    return found


def _slowest_groups(moves: Sequence[Move]) -> dict[str, Any]:
    """Return the number of groups of moves, and the slowest ones.

    A group has left one worker for another at once: its answers share their steps, so one delay shows in all their pauses,
    and the 99th percentile of some hundred moves may be that of one group.
    """
    groups: list[list[Move]] = []
    newest: dict[tuple[str, ...], list[Move]] = {}
    for move in sorted(moves, key=lambda move: move["handed_off_at"]):
        key = (move["source"], *move["targets"])
        group = newest.get(key)
        if group is None or move["handed_off_at"] - group[-1]["handed_off_at"] > _TOGETHER_SECONDS:
            group = newest[key] = []
            groups.append(group)
        group.append(move)
    groups.sort(key=lambda group: max(move["pause_seconds"] for move in group), reverse=True)
    return {"num_groups": len(groups), "slowest_groups": [_summary(group) for group in groups[:_NUM_SLOWEST]]}


def _summary(group: Sequence[Move]) -> dict[str, Any]:
    pauses = quantiles([move["pause_seconds"] for move in group])
    slowest = max(group, key=lambda move: move["pause_seconds"])
    return {
        "way": " -> ".join([slowest["source"], *slowest["targets"]]),
        "count": pauses["count"],
        "p50": pauses["p50"],
        "max": pauses["max"],
        "num_steps": slowest["num_steps"],
        "parts": _parts_of(slowest),
        "num_bytes": sum(move["num_bytes"] for move in group),
    }


def _parts_of(move: Move) -> dict[str, float]:
    """Return the parts of a move in seconds; ``handing_off`` was before its pause, and ``other`` is the rest of that.

    The rest: the way of the order and of the token, the step that ran at the target, and the step of the token.
    """
    parts = {name: float(move[f"{name}_seconds"]) for name in ("waiting", "fetching", "queue")}
    other = move["pause_seconds"] - sum(parts.values())
    parts = {"handing_off": move["handed_off_at"] - move["ordered_at"], **parts, "other": max(0.0, other)}
    return {name: round(seconds, 4) for name, seconds in parts.items()}


def _bound(step: float, transfer: float) -> float:
    return round(max(_STEPS * step, _MIN_BOUND_SECONDS) + transfer, 4)
