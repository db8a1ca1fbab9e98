"""The workers of both pools, as routers and launcher list them; a data-parallel group is one of them. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import msgspec

from autoscaler.groups import DRAINING, KEEPABLE, Facts
from autoscaler.signals import PoolSignals
from contract.decoding import converter
from contract.identity import Role

NUM_STARTS = 9
"""The starts whose median counts."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Numbers(msgspec.Struct):
    """The numbers of a worker's facts that are calculated with."""

    num_legs: _Count
    max_requests: _Count
    num_leg_tokens: _Count
    max_tokens: _Count
    num_running: _Count | None = None
    step_seconds: _Seconds | None = None
    prefill_seconds_per_token: _Seconds | None = None


def check_facts(workers: Sequence[Facts]) -> None:
    """Check the numbers in a router's list of workers. Raises ValueError that names the field."""
    for worker in workers:
        _numbers(worker)


_numbers = converter(_Numbers)


@dataclass(frozen=True)
class _Start:
    """A worker that is not ready. is_measured: its start was ordered at ``since``, and seen from then on."""

    role: Role
    since: float
    is_measured: bool


@dataclass
class PoolBook:
    """Owns what is remembered of workers: since when each one is not ready, and how long recent starts took.

    initial_seconds: time of the starts before the first order; None if it is not known.
    """

    initial_seconds: float | None = None
    _starting: dict[str, _Start] = field(default_factory=dict)
    _launched: set[str] | None = None
    _starts: list[float] = field(default_factory=list)

    @property
    def start_seconds(self) -> float | None:
        """The median time of recent starts, also of those that were given up; before the first one ``initial_seconds``."""
        return median(self._starts) if self._starts else self.initial_seconds

    @property
    def num_starts(self) -> int:
        """The number of recent starts whose end was seen."""
        return len(self._starts)

    def update(
        self,
        now: float,
        launched: Sequence[tuple[str, Role]],
        workers: Mapping[str, Facts],
        *,
        keepable: Collection[str] = (),
        is_known: bool = True,
    ) -> dict[Role, PoolSignals]:
        """Return the signals of both pools.

        launched: see ``Launcher.names``. keepable: workers that serve again if they are asked to while they drain. is_known:
        False while routers or launcher do not answer, and these are the facts of before; the waits for workers begin anew
        then.
        """
        starting: dict[str, Role] = {
            name: Role(workers[name]["role"]) if name in workers else role
            for name, role in launched
            if name not in workers or workers[name]["state"] == "starting"
        }
        for name in self._starting.keys() - starting.keys():
            start = self._starting.pop(name)
            # A name that is gone was given up or removed by hand: that took the time of a failure, not of a start.
            if name in workers and start.is_measured and now > start.since:
                self._took(now - start.since)
        for name, role in starting.items():
            # A worker that was there before has lost its router, or is started again: its model may be loaded already.
            is_new = self._launched is not None and name not in self._launched
            start = self._starting.get(name, _Start(role, now, is_new))
            # While routers or launcher are silent, a worker may have become ready unseen: it is not given up for that.
            self._starting[name] = start if is_known else _Start(role, now, is_measured=False)
        self._launched = {name for name, _ in launched}
        return {
            role: _signals(
                role,
                [one for one in workers.values() if one["role"] == role.value],
                tuple(now - start.since for start in self._starting.values() if start.role is role),
                keepable,
            )
            for role in (Role.PREFILL, Role.DECODE)
        }

    def oldest_start(self, role: Role, names: Collection[str]) -> str | None:
        """Return the one of these workers that has been starting in a role for longest."""
        of_role = [name for name, start in self._starting.items() if start.role is role and name in names]
        return min(of_role, key=lambda name: self._starting[name].since, default=None)

    def give_up(self, name: str, now: float) -> None:
        """Remove a worker that is not ready. The time counts as that of a start: the next one may take as long."""
        self._took(now - self._starting.pop(name).since)
        if self._launched is not None:
            self._launched.discard(name)

    def _took(self, seconds: float) -> None:
        self._starts = [*self._starts, seconds][-NUM_STARTS:]


@dataclass(frozen=True)
class WorkerFigures:
    """Figures of the workers. num_prefill_legs: prompts that are bound to prefill workers."""

    num_prefill_legs: int = 0
    step_seconds: float | None = None
    prefill_seconds_per_token: float | None = None


def figures(workers: Mapping[str, Facts]) -> WorkerFigures:
    """Return what the workers report together: the medians, since a single worker may report anything."""
    prefill = [one for one in workers.values() if one["role"] == Role.PREFILL.value]
    decode = [one for one in workers.values() if one["role"] == Role.DECODE.value]
    return WorkerFigures(
        num_prefill_legs=sum(one["num_legs"] for one in prefill),
        step_seconds=_median(decode, "step_seconds"),
        prefill_seconds_per_token=_median(prefill, "prefill_seconds_per_token"),
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


def _signals(
    role: Role, workers: Sequence[Facts], ages: tuple[float, ...], keepable: Collection[str]
) -> PoolSignals:
    ready = [one for one in workers if one["state"] == "serving"]
    is_prefill = role is Role.PREFILL
    return PoolSignals(
        num_ready=len(ready),
        starting_ages=ages,
        num_draining=sum(one["state"] in DRAINING for one in workers),
        num_keepable=sum(one["state"] in KEEPABLE and one["id"] in keepable for one in workers),
        num_changing=sum(one["state"] == "changing" for one in workers),
        # A decode worker's legs also wait for their prompts: only what it computes now fills its batch.
        num_in_flight=sum(one["num_legs"] if is_prefill else one["num_running"] or 0 for one in ready),
        max_in_flight=sum(one["max_requests"] for one in ready),
        max_tokens=sum(one["max_tokens"] for one in ready),
        # Also True for an empty pool: requests wait for it just as for one whose workers are all full.
        is_full=all(
            one["num_legs"] >= one["max_requests"] or one["num_leg_tokens"] >= one["max_tokens"]
            for one in ready
        ),
    )


def _median(workers: Sequence[Facts], name: str) -> float | None:
    values = [one[name] for one in workers if one[name] is not None]
    return median(values) if values else None
