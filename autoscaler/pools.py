"""The workers of both pools, as routers and launcher list them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from autoscaler.router_counts import WorkerFigures
from autoscaler.signals import PoolSignals
from contract.identity import Role

_DRAINING = ("draining", "empty", "leaving")
_NUM_STARTS = 9
Facts = Mapping[str, Any]


def merged(lists: Iterable[Sequence[Facts]]) -> dict[str, dict[str, Any]]:
    """Return each worker's facts by its id, from the lists of several routers: legs and shares of credit add up."""
    found: dict[str, dict[str, Any]] = {}
    for workers in lists:
        for worker in workers:
            known = found.setdefault(worker["id"], dict(worker))
            if known is not worker and known != worker:
                for name in ("num_legs", "max_requests", "num_leg_tokens", "max_tokens"):
                    known[name] += worker[name]
    return found


@dataclass
class PoolBook:
    """Owns what is remembered of workers: since when each one is not ready, and how long recent starts took."""

    _absent_since: dict[str, float] = field(default_factory=dict)
    _starts: list[float] = field(default_factory=list)

    @property
    def start_seconds(self) -> float | None:
        """The median time of recent starts, also of those that were given up; None before the first one."""
        return median(self._starts) if self._starts else None

    def update(
        self, now: float, launched: Sequence[tuple[str, Role]], workers: Mapping[str, Facts]
    ) -> dict[Role, PoolSignals]:
        """Return the signals of both pools. launched: see ``Launcher.names``."""
        starting: dict[str, Role] = {
            name: Role(workers[name]["role"]) if name in workers else role
            for name, role in launched
            if name not in workers or workers[name]["state"] == "starting"
        }
        for name in [name for name in self._absent_since if name not in starting]:
            seconds = now - self._absent_since.pop(name)
            if seconds > 0:
                self._starts = [*self._starts, seconds][-_NUM_STARTS:]
        ages = {name: now - self._absent_since.setdefault(name, now) for name in starting}
        return {
            role: _signals(
                role,
                [one for one in workers.values() if one["role"] == role.value],
                tuple(ages[name] for name, each in starting.items() if each is role),
            )
            for role in (Role.PREFILL, Role.DECODE)
        }

    def oldest_start(self, role: Role, launched: Sequence[tuple[str, Role]]) -> str | None:
        """Return the worker of a role that has been starting for longest."""
        names = [name for name, each in launched if each is role and name in self._absent_since]
        return min(names, key=lambda name: self._absent_since[name], default=None)


def figures(workers: Mapping[str, Facts]) -> WorkerFigures:
    """Return what the workers report together."""
    prefill = [one for one in workers.values() if one["role"] == Role.PREFILL.value]
    decode = [one for one in workers.values() if one["role"] == Role.DECODE.value]
    return WorkerFigures(
        num_prefill_legs=sum(one["num_legs"] for one in prefill),
        hit_rate=_mean(prefill, "prefix_hit_rate") or 0.0,
        step_seconds=_mean(decode, "step_seconds"),
        prefill_seconds_per_token=_mean(prefill, "prefill_seconds_per_token"),
    )


def cheapest(workers: Iterable[Facts], role: Role, launched: Sequence[tuple[str, Role]]) -> str | None:
    """Return the serving worker of a role with the fewest tokens to move, of those that the launcher can remove."""
    names = {name for name, _ in launched}
    serving = [
        one
        for one in workers
        if one["role"] == role.value and one["state"] == "serving" and one["id"] in names
    ]
    found = min(serving, key=lambda one: (one["num_leg_tokens"], one["id"]), default=None)
    return None if found is None else str(found["id"])


def _signals(role: Role, workers: Sequence[Facts], ages: tuple[float, ...]) -> PoolSignals:
    ready = [one for one in workers if one["state"] == "serving"]
    is_prefill = role is Role.PREFILL
    return PoolSignals(
        num_ready=len(ready),
        starting_ages=ages,
        num_draining=sum(one["state"] in _DRAINING for one in workers),
        num_changing=sum(one["state"] == "changing" for one in workers),
        num_in_flight=sum(one["num_legs"] if is_prefill else one["num_running"] or 0 for one in ready),
        max_in_flight=sum(one["max_requests"] for one in ready),
        is_full=all(
            one["num_legs"] >= one["max_requests"] or one["num_leg_tokens"] >= one["max_tokens"]
            for one in ready
        ),
    )


def _mean(workers: Sequence[Facts], name: str) -> float | None:
    values = [one[name] for one in workers if one[name] is not None]
    return fmean(values) if values else None
