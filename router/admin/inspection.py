"""The state of a router for its operators: metrics and /debug/state."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client.registry import Collector

from router.admin.scaling import ScalingReports
from router.batches.service import BatchService
from router.migration.standing_orders import StandingOrders
from router.request_path import RequestPath
from router.telemetry.metrics import SAMPLE_SECONDS, RouterMetrics
from router.telemetry.pool_state import PoolLoad, decided_by, pool_states
from router.workers.worker_facts import worker_facts
from serving.admin import process_identity
from serving.metrics import Alias, AliasCollector


class Inspection:
    """Reads the parts of a router. batches: None if the router keeps no files. aliases: second names of metrics.

    num_restarts: how often its supervisor has restarted the router. scaling: the reports of the autoscaler.
    standing: who drains a worker.
    """

    def __init__(
        self,
        path: RequestPath,
        metrics: RouterMetrics,
        scaling: ScalingReports,
        standing: StandingOrders,
        batches: BatchService | None,
        aliases: Sequence[Alias],
        num_restarts: int = 0,
    ) -> None:
        self._scaling = scaling
        self._standing = standing
        self._aliases = aliases
        self._num_restarts = num_restarts
        self._path = path
        self._metrics = metrics
        self._batches = batches

    async def collector(self) -> Collector:
        """Return the metrics of this moment."""
        if self._batches:
            self._metrics.batches.set_files(*await self._batches.gauges())
        path = self._path
        metrics = self._metrics
        metrics.load.set_requests(path.tracker.num_waiting, path.tracker.num_running, path.queue.decisions())
        metrics.load.set_pools(self._loads(), path.registry.memory.restarts)
        failed = path.runs.unreachable.failed(path.registry.workers)
        metrics.load.set_failed_pairs(Counter(pair.kind for pair in failed))
        metrics.recent.set()
        # gauges are set when they are read: what depends on time has no event at which it changes
        self._scaling.publish()
        return AliasCollector(metrics, self._aliases, self._model_name)

    def facts(self) -> dict[str, Any]:
        """Return this router and its workers as plain data, for operators."""
        path = self._path
        waiting = path.tracker.num_waiting
        running = path.tracker.num_running
        failed = path.runs.unreachable.facts(path.registry.workers)
        num_failed = Counter(name for pair in failed for name in (pair["prefill"], pair["decode"]))
        return {
            "version": version("kvbaton"),
            "model": self._model_name() or None,
            "num_requests_waiting": waiting,
            "num_requests_running": running,
            "router": {
                **process_identity(self._num_restarts),
                "is_ready": path.missing is None,
                "num_requests_waiting": waiting,
                "num_requests_running": running,
                **self._metrics.recent.rates(),
            },
            "pools": self.pools(),
            "failed_pairs": failed,
            "workers": [
                {
                    **worker_facts(worker),
                    "num_failed_pairs": num_failed[worker.name],
                    "drained_by": self._standing.drained_by(worker),
                }
                for worker in path.registry.workers
            ],
        }

    def pools(self) -> dict[str, dict[str, Any]]:
        """Return the load of each pool, and the autoscaler's decision about it, as plain data, by role."""
        decided = self._scaling.facts()
        return {
            load.role.value: {**load.as_dict(), **decided.get(load.role.value, {})} for load in self._loads()
        }

    def _loads(self) -> list[PoolLoad]:
        path = self._path
        pools = pool_states(path.registry.workers, path.queue.oldest_waits())
        recent = self._metrics.recent.latency()
        goals = self._metrics.requests.times.goals.goals
        return [
            PoolLoad(
                *(role, pool.states, pool.utilization, pool.queue_seconds),
                pool.pressure(goals, decided_by(role, pools, recent)),
            )
            for role, pool in pools.items()
        ]

    async def sample(self) -> None:
        """Sample the counts whose recent growth is published, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._metrics.recent.sample()

    def _model_name(self) -> str:
        models = self._path.models
        return models.card().name if models.is_known else ""

    def debug_state(self) -> dict[str, Any]:
        """Return the model, the requests, those of batches, the last moves and the workers as plain data."""
        path = self._path
        return {
            "model": path.models.card().name if path.models.is_known else None,
            "requests": path.tracker.num_by_state(),
            "num_in_line": len(path.queue),
            "batch_requests": self._batches.gate.num_by_state() if self._batches else None,
            "num_tasks": len(path.tasks),
            "moves": [move.as_dict() for move in self._metrics.moves.recent],
            "workers": [worker.debug_state() for worker in path.registry.workers],
        }
