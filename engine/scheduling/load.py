"""Questions about the work of a scheduler, which change nothing, and moving averages of how long its steps take."""

from engine.outputs import SchedulerOutput
from engine.scheduling.batch.batching import Batcher
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.remote_kv import RemoteKV
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.stats import SchedulerStats, Totals
from engine.scheduling.waits.waits import Waits

# Weight of the newest step; the last 20 steps dominate.
_WEIGHT = 0.05


class StepTimes:
    """Averages steps that compute prompts, and steps that only continue answers. Steps without tokens do not count.

    seconds: mean length of a step that only continues answers; None before the first one. prefill_seconds_per_token: seconds
    of steps that compute prompts, divided by the tokens of these steps; None before the first one.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.prefill_seconds_per_token: float | None = None
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record a step."""
        num_tokens = scheduled.total_num_scheduled_tokens
        # More than one token for each request: prompts are among them.
        if num_tokens > len(scheduled.num_scheduled_tokens):
            self._prompt_seconds += _WEIGHT * (seconds - self._prompt_seconds)
            self._prompt_tokens += _WEIGHT * (num_tokens - self._prompt_tokens)
            self.prefill_seconds_per_token = self._prompt_seconds / self._prompt_tokens
        elif num_tokens:
            self.seconds = (
                seconds if self.seconds is None else self.seconds + _WEIGHT * (seconds - self.seconds)
            )


class Load:
    """Answers what the step loop, its gate and the metrics ask of a scheduler. step_times: of the steps so far."""

    def __init__(
        self,
        live: LiveRequests,
        queues: BatchQueues,
        batcher: Batcher,
        pool: BlockPool,
        waits: Waits,
        remote_kv: RemoteKV,
        totals: Totals,
    ) -> None:
        self._live = live
        self._queues = queues
        self._batcher = batcher
        self._pool = pool
        self._waits = waits
        self._remote_kv = remote_kv
        self._totals = totals
        self.step_times = StepTimes()

    def needs_step(self) -> bool:
        """Return False while all requests wait for events, blocks or deadlines, so that a step would change nothing."""
        return bool(self._queues.running.requests) or self.has_changes()

    def has_changes(self) -> bool:
        """Return whether something has happened since the last step was decided."""
        live = self._live
        is_changed = (
            live.has_changes or live.finished_req_ids or live.outbox.outputs or self._waits.has_pending
        )
        return bool(is_changed) or self._remote_kv.connector.has_work()

    def may_run_ahead(self) -> bool:
        """Return whether nothing has happened that the next step must consider.

        Requests that have finished only make room, which matters if another one waits for it.
        """
        live = self._live
        if live.outbox.outputs or self._waits.has_pending or self._remote_kv.connector.has_work():
            return False
        # Only a request that waits can use the room of those that have finished.
        is_awaited = (
            self._queues.waiting.requests
            or self._queues.arrived.requests
            or self._remote_kv.receiver.unserved
        )
        return not (is_awaited and (live.has_changes or live.finished_req_ids))

    def is_decode_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""
        return (
            bool(self._queues.running.requests or self._queues.arrived.requests)
            and not self._queues.waiting.requests
        )

    def has_room(self) -> bool:
        """Return whether another request could run."""
        return self._batcher.admission.has_room

    def seconds_to_pause(self) -> float:
        """Return how long the next step is delayed, so that other clients find the machine idle."""
        queues = self._queues
        return self._batcher.fair_steps.seconds_to_pause(queues.running, queues.arrived, queues.waiting)

    # Counts.

    def is_free(self) -> bool:
        """Return whether no request is live, no output waits, and no KV is lent to other engines."""
        return not (self._live.by_key or self._live.outbox.outputs or self._remote_kv.sender.leases)

    def has_requests(self) -> bool:
        """Return whether a request has not finished, or the runner still keeps one that has."""
        return bool(self._live.by_key or self._live.finished_req_ids)

    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the scheduler's state; a request that waits for KV from another worker counts as waiting."""
        num_running = len(self._queues.running.requests)
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=len(self._live.by_key) - num_running,
            kv_cache_usage=self._pool.usage,
            num_queued_prompt_tokens=self._queues.num_queued_prompt_tokens(),
            num_free_blocks=self._pool.num_free_blocks,
            num_leases=len(self._remote_kv.sender.leases),
            num_fetches=len(self._remote_kv.receiver.waiting),
            prefill_seconds_per_token=self.step_times.prefill_seconds_per_token,
            step_seconds=self.step_times.seconds,
            prefix_cache_stats=self._totals.prefix_cache,
            num_corrupted_reqs=self._totals.num_corrupted,
        )
