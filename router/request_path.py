"""The path of a request through the router, from admission to its last token, without any port; and what it lacks."""

from collections.abc import Callable

from contract.identity import Role
from router.admission.admission_queue import AdmissionQueue
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.request_run import RequestRuns
from router.attempts.request_tracker import RequestTracker
from router.attempts.suspects import Suspects
from router.concurrency import ChangeSignal, TaskSet
from router.intake.limits import TenantRules
from router.intake.model_source import ModelSource
from router.intake.request_preparer import RequestPreparer, TokenizerThreads
from router.pipeline import Pipeline
from router.routing.policy import missing_roles
from router.routing.running_shares import RunningShares
from router.settings import RouterSettings
from router.telemetry.metrics import RequestMetrics
from router.tokens.inbox import UnreadBytes
from router.workers.registry import Registry

Wakes = Callable[[frozenset[Role]], bool]
"""Returns True if an autoscaler starts workers of these roles for a request that waits."""


class RequestPath:
    """Owns the parts that every request passes. To be used in one event loop. wakes: see ``Wakes``."""

    def __init__(self, settings: RouterSettings, metrics: RequestMetrics, wakes: Wakes) -> None:
        self._wakes = wakes
        self.changes = ChangeSignal()
        self.registry = Registry(self.changes, settings.worker_wait_seconds)
        self.models = ModelSource(self.changes, settings.served_model_name, settings.parsers)
        self.tracker = RequestTracker(settings.max_queue, metrics)
        self.tokenizers = TokenizerThreads()
        self.tasks = TaskSet()
        unreachable = UnreachablePairs()
        shares = RunningShares(settings.max_key_share)
        self.queue = AdmissionQueue(
            self.registry, self.changes, unreachable, shares, settings.worker_wait_seconds
        )
        unread = UnreadBytes(settings.client_buffer_bytes, settings.max_unread_bytes)
        self.runs = RequestRuns(
            self.queue,
            unreachable,
            unread,
            settings.max_replays,
            settings.max_worker_deaths,
            Suspects(),
        )
        preparer = RequestPreparer(
            self.models,
            self.registry,
            self.tokenizers,
            TenantRules(
                settings.shared_prefix_cache,
                settings.max_priority,
                is_lower_first=settings.priority_order == "lower-first",
            ),
            settings.request_timeout_seconds,
            shortens_answers=not settings.strict_api,
        )
        self.pipeline = Pipeline(self.models, preparer, self.tracker, self.runs)

    @property
    def missing(self) -> str | None:
        """The model or the workers that are missing to answer a request; None if there are all, or can be woken."""
        missing = self.registry.missing()
        if missing is not None:
            serving = {worker.role for worker in self.registry.workers if worker.has_credit}
            # a pool that was scaled to zero starts for the first request, so the service counts as healthy
            if self._wakes(missing_roles(serving, embeds_only=self.registry.embeds_only)):
                missing = None
        return missing or (None if self.models.is_known else "the model is not known yet")

    @property
    def degraded(self) -> str | None:
        """The reason why answers cost more than they should; None if all pairs of workers can hand KV over."""
        num_failed = len(self.runs.unreachable.failed(self.registry.workers))
        if not num_failed:
            return None
        pairs = "1 pair of workers" if num_failed == 1 else f"{num_failed} pairs of workers"
        return f"{pairs} cannot hand KV over; /admin/workers names them"

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Block until ``is_true``; it is called again after every change of the workers or the model."""
        changed = self.changes.next
        while not is_true():
            await changed.wait()
            changed = self.changes.next

    def close(self) -> None:
        """Release threads and processes. Call it when no request is left."""
        self.queue.close()
        self.tokenizers.close()
        self.models.close()
