"""The state of a router for its operators: metrics and /debug/state."""

from typing import Any

from prometheus_client.registry import Collector

from router.batches.service import BatchService
from router.metrics import RouterMetrics
from router.request_path import RequestPath


class Inspection:
    """Reads the parts of a router. batches: None if the router keeps no files."""

    def __init__(self, path: RequestPath, metrics: RouterMetrics, batches: BatchService | None) -> None:
        self._path = path
        self._metrics = metrics
        self._batches = batches

    async def collector(self) -> Collector:
        """Return the metrics of this moment."""
        if self._batches:
            self._metrics.batches.set_files(*await self._batches.gauges())
        tracker = self._path.tracker
        self._metrics.load.set(tracker.num_waiting, tracker.num_running, self._path.registry.views)
        return self._metrics

    def debug_state(self) -> dict[str, Any]:
        """Return the model, the requests, the last moves and the workers as plain data."""
        path = self._path
        return {
            "model": path.models.card().name if path.models.is_known else None,
            "requests": path.tracker.num_by_state(),
            "num_in_line": len(path.queue),
            "num_tasks": len(path.tasks),
            "moves": [move.as_dict() for move in self._metrics.moves.recent],
            "workers": [worker.debug_state() for worker in path.registry.workers],
        }
