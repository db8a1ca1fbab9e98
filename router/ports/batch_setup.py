"""The files and batches of a router, connected to the rest of it."""

import asyncio
from collections.abc import Callable

from router.attempts.draining import Drain
from router.batches.service import BatchService
from router.http.batch_answers import BatchAnswers
from router.request_path import RequestPath
from router.settings import RouterSettings
from router.telemetry.metrics import BatchMetrics


def build_batches(
    settings: RouterSettings,
    path: RequestPath,
    drain: Drain,
    metrics: BatchMetrics,
    clock: Callable[[], float],
) -> BatchService | None:
    """Return the service, not started; None if ``settings`` have no folder for files. clock: Unix seconds.

    Requests of batches begin when no other request waits for workers. A running one is preempted when another request
    starts to wait and has not got workers by the event loop's next turn.
    """
    if settings.files_dir is None:
        return None

    def is_ready() -> bool:
        return not drain.is_on and path.missing is None

    service = BatchService(
        settings.files_dir,
        settings.folder_limits,
        BatchAnswers(path.pipeline, path.models, is_ready, settings),
        max_concurrency=settings.batches_max_concurrency,
        may_begin=lambda: path.tracker.num_unbound == 0 and not drain.is_on,
        count_result=metrics.count_requests,
        clock=clock,
    )

    def preempt() -> None:
        if is_ready():
            service.preempt(path.tracker.num_queued)

    def preempt_soon() -> None:
        asyncio.get_running_loop().call_soon(preempt)

    path.tracker.on_fewer_unbound(service.admit)
    path.tracker.on_queued(preempt_soon)
    return service
