"""Questions about the work of a scheduler. None of them changes anything."""

from engine.scheduling.batch.batching import Batcher
from engine.scheduling.batch.step_times import StepTimes
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.remote.remote_kv import RemoteKV
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.stats import SchedulerStats, Totals
from engine.scheduling.waits.waits import Waits


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
        return bool(self._queues.running) or self.has_changes()

    def has_changes(self) -> bool:
        """Return whether something has happened since the last step was decided."""
        live = self._live
        is_changed = live.has_changes or live.finished_req_ids or live.outbox or self._waits.has_pending
        return bool(is_changed) or self._remote_kv.has_work

    def may_run_ahead(self) -> bool:
        """Return whether nothing has happened that the next step must consider.

        Requests that have finished only make room, which matters if another one waits for it.
        """
        live = self._live
        if live.outbox or self._waits.has_pending or self._remote_kv.has_work:
            return False
        is_awaited = self._queues.waiting or self._queues.arrived or self._remote_kv.unserved
        return not (is_awaited and (live.has_changes or live.finished_req_ids))

    def has_answers_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""
        return bool(self._queues.running or self._queues.arrived) and not self._queues.waiting

    def has_room(self) -> bool:
        """Return whether another request could run."""
        return self._batcher.admission.has_room

    def seconds_to_pause(self) -> float:
        """Return how long the next step is delayed, so that other clients find the machine idle."""
        queues = self._queues
        return self._batcher.fair_steps.seconds_to_pause(queues.running, queues.arrived, queues.waiting)

    def next_deadline(self) -> float | None:
        """Return when, on the clock, a step is needed even if nothing happens before."""
        return self._live.deadlines.next()

    # Counts.

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not finished."""
        return len(self._live.by_key)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not finished."""
        return bool(self._live.by_key)

    def is_free(self) -> bool:
        """Return whether no request is live, no output waits, and no KV is lent to other engines."""
        return not (self._live.by_key or self._live.outbox or self._remote_kv.leases)

    def has_finished_requests(self) -> bool:
        """Return whether the runner still keeps a request that has finished."""
        return bool(self._live.finished_req_ids)

    def has_requests(self) -> bool:
        """Return whether a request has not finished, or the runner still keeps one that has."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); a request that waits for KV from another worker counts as waiting."""
        num_running = len(self._queues.running)
        return num_running, self.get_num_unfinished_requests() - num_running

    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the scheduler's state."""
        running, waiting = self.get_request_counts()
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            kv_cache_usage=self._pool.usage,
            num_queued_prompt_tokens=self._queues.num_queued_prompt_tokens(),
            num_free_blocks=self._pool.num_free_blocks,
            num_leases=len(self._remote_kv.leases),
            num_fetches=self._remote_kv.num_fetches,
            prefill_seconds_per_token=self.step_times.prefill_seconds_per_token,
            step_seconds=self.step_times.seconds,
            prefix_cache_stats=self._totals.prefix_cache,
            num_corrupted_reqs=self._totals.num_corrupted,
        )
